"""A load of LMCache's fails, and the SimpleCPUOffloadConnector beside it stores the blocks under valid keys.

A MultiConnector of both. It takes tokens that are to be loaded in a step for computed, and stores their blocks in it.
They are computed anew into the same blocks, which then have their keys when the store is over.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        fail_load("r"),
        admit("r", prompt(300), max_tokens=4),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="the SimpleCPUOffloadConnector stores other KV",
    wrong={"vllm": ">=0.32"},
    options=Options(offloading="last", simple_offloading=True, max_num_batched_tokens=512),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    not_in_hooks=CONTENT,
)
