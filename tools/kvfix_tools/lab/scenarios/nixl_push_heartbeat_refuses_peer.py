"""A request waits for blocks while its heartbeat tries to connect to ranks that share a KV head: its load fails."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, expect_all_ended, handshakes_take, on, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        handshakes_take(3),
        on("decode", "take_blocks", 39),
        ask_at_once("r", prompt(64)),
        step(6),
        on("decode", "free_blocks"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB002",
    text="loaded up to 0 of 64",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="nixl-push",
        num_blocks=40,
        ranks=2,
        peer_ranks=1,
        extra={"kv_lease_duration": 3, "push_registration_timeout": 30.0},
    ),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
