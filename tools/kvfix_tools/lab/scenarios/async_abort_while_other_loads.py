"""A request is aborted while the OffloadingConnector loads for it: what LMCache has fetched for it is kept for ever.

A MultiConnector asks both, and LMCache's lookup fetches. Only a step with the request in it releases that.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, admit, prompt, reset_prefix_cache, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(300)),
        run(),
        step(3),
        reset_prefix_cache(),
        admit("r", prompt(300), max_tokens=2),
        step(2),  # looked up; the OffloadingConnector is granted the load
        abort("r"),
        settle(),
    ],
    rule="KVR009",
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.5.6"},
    options=Options(lmcache={"enable_async_loading": True}, offloading="first", delay=3, max_num_batched_tokens=512),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
)
