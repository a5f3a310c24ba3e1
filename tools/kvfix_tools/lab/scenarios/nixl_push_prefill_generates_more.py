"""The router lets the prefill engine generate beyond the prompt's last block: all KV is written shifted by a block."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(64), 2, 5),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="holds other KV",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push"),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
