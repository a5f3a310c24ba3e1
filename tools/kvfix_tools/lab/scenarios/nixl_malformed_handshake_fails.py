"""The parameters of a request name its blocks in one list, and the handshake fails: the request waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, fail, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("flat_blocks"),
        fail("handshake"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="WAITING_FOR_REMOTE_KVS for ever",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
