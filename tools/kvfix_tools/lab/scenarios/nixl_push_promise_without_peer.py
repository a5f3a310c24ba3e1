"""The parameters of one request do not say where the prefill engine is: the decode engine dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("no_host"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="KeyError: 'remote_host'",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push"),
    needs={"vllm": ">=0.32"},
)
