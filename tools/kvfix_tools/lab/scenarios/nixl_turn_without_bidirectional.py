"""The parameters name blocks of a turn before, and `bidirectional_kv_xfer` is off: the request waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("decode_too"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR010",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
