"""With `bidirectional_kv_xfer` a request that loads the blocks of the turn before is preempted: it waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, on, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        malform("decode_too"),
        ask("r", prompt(64), 5),
        step(5),
        on("decode", "preempt", "r-00000002"),
        run(),
        expect_all_ended(),
    ],
    rule="KVR010",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="nixl-pull", prefix_caching=False, extra={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8}
    ),
    needs={"vllm": ">=0.32"},
)
