"""One of two ranks of the decode engine gets the notice of a write while it connects yet: the engine dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, expect_all_ended, fail, handshakes_take, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        fail("handshake", 1),
        ask_at_once("before", prompt(64)),
        step(8),                                     # one rank has connected, the other has not
        handshakes_take(10),
        ask_at_once("r", prompt(64, 1)),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="KeyError",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
    needs={"vllm": ">=0.32"},
)  # fmt: skip
