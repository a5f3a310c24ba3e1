"""The router lets prefill generate more than one token: the KV is sent shifted by a block."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(60), 5, 20),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="holds other KV",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
