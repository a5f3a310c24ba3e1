"""A client goes away during its prefill: decode waits for the KV until a timeout, and keeps its blocks."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import abort, ask_at_once, on, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        on("prefill", "budget", 16),
        ask_at_once("r", prompt(64), 5),
        step(3),
        abort("r"),
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
