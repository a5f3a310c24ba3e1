"""A load fails, and before vLLM hears of it the request is aborted: its blocks stay in the prefix cache as they are.

vLLM looks at the requests that run. Between a step and its answer one may be aborted, and with asynchronous scheduling
be preempted; its blocks can be found by then, and hold nothing.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import abort, admit, fail_load, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(96)),
        fail_load("before"),
        admit("before", prompt(100), max_tokens=4),
        step(),
        abort("before"),
        step(),
        admit("r", prompt(100), max_tokens=2),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.4.1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.4.1"},
    options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
)
