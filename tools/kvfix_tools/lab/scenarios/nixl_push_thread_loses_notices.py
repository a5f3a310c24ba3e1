"""A registration is for more blocks than the prefill engine has of an earlier request of this id: others are lost."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, ask_at_once, expect_all_ended, prompt, router_takes, run, step

SCENARIO = Scenario(
    schedule=[
        router_takes(100),
        ask("r", prompt(32)),
        step(3),
        ask_at_once("r", prompt(200)),
        ask_at_once("s", prompt(200, seed=1)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="WAITING_FOR_REMOTE_KVS",
    request="s-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
