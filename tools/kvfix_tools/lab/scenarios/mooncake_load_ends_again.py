"""Prefill goes away after it has written one of two loads of a message: decode reports both failed, EngineCore dies."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, budget, expect_all_ended, prompt, restart, run, step, time_passes

SCENARIO = Scenario(
    schedule=[
        budget(16),
        ask_at_once("r", prompt(16)),
        ask_at_once("s", prompt(200, seed=1)),
        step(8),
        restart("prefill", 60),
        time_passes(541.0),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    request="",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
