"""The parameters of a request ask for a rank that the prefill engine does not have: its thread for handshakes dies."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("more_ranks"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB021",
    text="answers no handshake",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
