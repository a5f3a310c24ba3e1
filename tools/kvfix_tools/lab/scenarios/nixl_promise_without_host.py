"""A request of a decode engine does not say where the prefill engine is: it waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("no_host"),
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
