"""A load of LMCache's fails, and the OffloadingConnector beside it stores the blocks under valid keys.

A MultiConnector of both. The OffloadingConnector plans its stores with the step, and copies the blocks at the beginning
of the next one, whether or not LMCache has filled them.
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
    text="the OffloadingConnector stores other KV",
    wrong={"vllm": ">=0.32"},
    options=Options(offloading="last", max_num_batched_tokens=512),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    not_in_hooks=CONTENT,
)
