"""The router lets the prefill engine generate more than one token: it frees what the prompt's end needs of a window."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(60), 2, prefill_tokens=4),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="the step reads token 44 of 59 computed ones, its slot holds other KV in KV group 1",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull", windows=(16,)),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
