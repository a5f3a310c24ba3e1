"""Prefill takes decode's message late: decode has given its load up, and prefill writes into blocks of another one."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import (
    ask,
    ask_at_once,
    ask_decode,
    expect_all_ended,
    handshakes_take,
    on,
    prompt,
    run,
    step,
    time_passes,
)

SCENARIO = Scenario(
    schedule=[
        ask("a", prompt(32, seed=2)),
        run(),
        on("prefill", "take_blocks", 60),
        handshakes_take(20),
        ask_at_once("r", prompt(64)),
        step(2),
        time_passes(541.0),
        step(2),
        on("prefill", "free_blocks"),
        ask_decode("s", prompt(200, seed=1), 40),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    request="s-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="mooncake", prefix_caching=False, num_blocks=60, decode_blocks=18, kv_load_failure_policy="fail"
    ),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
