"""A request of a decode engine asks for a remote prefill and names no blocks: EngineCore dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("no_blocks"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="schedule: AssertionError",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
