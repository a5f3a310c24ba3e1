"""The prefill engine takes long to connect to the decode engine: it writes from blocks that are free."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, expect_all_ended, handshakes_take, prompt, run, step, step_alone

SCENARIO = Scenario(
    schedule=[
        ask_at_once("r", prompt(300)),
        step(3),
        handshakes_take(45),
        step(5),
        step_alone("prefill", 45),
        run(),
        expect_all_ended(),
    ],
    rule="KVR020",
    request="r-00000001",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"kv_lease_duration": 3}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
