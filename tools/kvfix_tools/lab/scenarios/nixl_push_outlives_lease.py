"""The decode engine hangs while it is written to: the lease ends, and others write where the write reads."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run, step, step_alone

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(64), 2),
        step(5),
        step_alone("prefill", 35),
        ask("s", prompt(64, seed=1)),
        step_alone("prefill", 5),
        run(),
        expect_all_ended(),
    ],
    rule="KVR021",
    request="r-00000001",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="nixl-push", num_blocks=8, delay=40, prefix_caching=False, extra={"kv_lease_duration": 3}
    ),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
