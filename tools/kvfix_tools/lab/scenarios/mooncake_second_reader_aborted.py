"""A request that was sent to decode again is aborted: prefill frees the blocks that it is writing to the first one."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, on, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(64), 2),
        step(3),
        send_again("r"),
        on("decode", "abort", "r-00000003"),
        run(),
        expect_all_ended(),
    ],
    rule="KVR021",
    request="r-00000001",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60, delay=5),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
