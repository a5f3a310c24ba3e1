"""The parameters of a request name the prefill engine by a list: the decode engine dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("odd_engine"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="add_request: TypeError",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
