"""The prefill engine cannot write, and the request is aborted: the decode engine keeps its blocks for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, ask, expect_all_ended, fail, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        fail("setup"),
        ask("r", prompt(64)),
        step(6),
        abort("r"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB020",
    text="of the decode engine",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    hooks_rule="KVR009",
)
