"""One request is done in prefill and waits for decode's blocks, another one has them and waits for prefill's."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, ask_at_once, expect_all_ended, prompt, router_takes, run, step

SCENARIO = Scenario(
    schedule=[
        router_takes(10),
        ask("r", prompt(64)),
        step(3),
        ask_at_once("s", prompt(64, seed=1)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="is WAITING",
    request="s-00000001",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", num_blocks=7, extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
