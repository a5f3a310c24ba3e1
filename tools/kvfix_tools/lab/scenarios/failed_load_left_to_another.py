"""Two requests with one prompt come in one step; the load of the first fails, it is aborted; the second counts on it.

A load within the step is in vLLM's prefix cache before it is done, so the second shares its blocks. After the failure
only the first goes back to compute them (vLLM 0.32 scheduler.py:3295).
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import abort, admit, fail_load, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(96)),
        admit("first", prompt(100)),
        admit("r", prompt(104), max_tokens=2),
        fail_load("first", after_chunks=1),
        step(),
        abort("first"),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
