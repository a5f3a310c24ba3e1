"""One of two ranks of the decode engine cannot connect and fails the load: prefill writes to it all the same."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, expect_all_ended, fail, prompt, run

SCENARIO = Scenario(
    schedule=[
        fail("handshake", 1),
        ask_at_once("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR022",
    text="does not wait for that",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
