"""The prefill engine cannot write: the decode engine waits for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, fail, prompt, run

SCENARIO = Scenario(
    schedule=[
        fail("setup"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="WAITING_FOR_REMOTE_KVS",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
