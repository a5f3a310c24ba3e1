"""Blocks whose load failed stay in vLLM's prefix cache, and the next request reads them: wrong text, no error.

With kv_load_failure_policy=recompute vLLM leaves them there, since the request is to compute them again at once
(scheduler.py 0.32.0:3412). If it is aborted or preempted before that, they stay.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import abort, admit, fail_load, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(96)),
        admit("before", prompt(100), max_tokens=4),
        fail_load("before"),
        step(),
        abort("before"),
        admit("r", prompt(100), max_tokens=2),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
