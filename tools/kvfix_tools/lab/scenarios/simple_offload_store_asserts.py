"""A load of LMCache's fails, and EngineCore dies at the end of the SimpleCPUOffloadConnector's store of its blocks.

As in simple-offload-stores-failed-load. With `kv_load_failure_policy=fail`, the default, vLLM takes the keys from the
blocks, and the connector insists on them.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        fail_load("r"),
        admit("r", prompt(300), max_tokens=4),
        admit("other", prompt(50, seed=1), max_tokens=8),  # the engine goes on
        run(),
        settle(),
    ],
    rule="KVR011",
    text="update_from_output: AssertionError",
    wrong={"vllm": ">=0.32"},
    options=Options(
        offloading="last", simple_offloading=True, max_num_batched_tokens=512, kv_load_failure_policy="fail"
    ),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
)
