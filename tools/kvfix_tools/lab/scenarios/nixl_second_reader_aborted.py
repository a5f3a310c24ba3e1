"""A router sends a request again, and gives up the second one before it is asked for: the first reads what is free."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, on, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[
        on("decode", "keep_blocks", 0),
        ask("r", prompt(64), 2),
        step(3),
        send_again("r"),
        step(),
        on("decode", "abort", "r-00000003"),
        step(3),
        on("prefill", "take_blocks", 60),
        step(),
        ask("s", prompt(32, seed=1)),
        step(),
        on("prefill", "free_blocks"),
        on("decode", "free_blocks"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="holds other KV",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
