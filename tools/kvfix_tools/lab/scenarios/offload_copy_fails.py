"""A copy of the OffloadingConnector's fails, and the worker dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(128)),
        run(),
        reset_prefix_cache(),
        fail_load("r"),
        admit("r", prompt(128), max_tokens=3),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="wait_for_save: AssertionError",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="offloading", max_num_batched_tokens=512),
    request="",
)
