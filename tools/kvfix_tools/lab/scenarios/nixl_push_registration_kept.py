"""The router sends a request to both engines at once, and gives it up: the prefill engine keeps its registration."""

from kvfix_tools.lab.scenario import MEMORY, Options, Scenario
from kvfix_tools.lab.steps import abort, ask_at_once, expect_all_ended, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        ask_at_once("r", prompt(300)),
        step(4),
        abort("r"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB022",
    text="the prefill engine keeps it",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=MEMORY,
)
