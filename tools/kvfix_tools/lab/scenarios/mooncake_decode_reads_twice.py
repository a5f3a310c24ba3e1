"""A router sends a request to decode again: the second one reads blocks that are free."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, on, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(64), 2),
        step(5),
        send_again("r"),
        step(3),
        on("prefill", "take_blocks", 60),
        step(5),
        on("prefill", "free_blocks"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="holds other KV",
    request="r-00000003",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60, delay=5),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
