"""The first token of a prefill ends its text: the blocks are not sent, and decode waits until a timeout."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, ends_at_once, prompt, run

SCENARIO = Scenario(
    schedule=[
        ends_at_once("r", prompt(64)),
        ask("r", prompt(64), 5),
        run(),
    ],
    rule="LAB026",
    text="has ended and is not sent",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
