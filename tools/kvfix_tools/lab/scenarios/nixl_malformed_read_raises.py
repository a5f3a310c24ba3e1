"""The parameters of a request name blocks by something that is no number: the decode engine dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("odd_blocks"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="start_load_kv: ValueError",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
