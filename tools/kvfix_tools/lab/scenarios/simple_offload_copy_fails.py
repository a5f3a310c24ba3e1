"""A copy of the SimpleCPUOffloadConnector's fails, and its thread ends: the request waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, expect_all_ended, fail_load, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(128)),
        run(),
        settle(),
        reset_prefix_cache(),
        fail_load("r"),
        admit("r", prompt(128), max_tokens=3),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="simple-offload", max_num_batched_tokens=512),
    not_in_hooks="the load was started, and a hook does not say how long it takes",
)
