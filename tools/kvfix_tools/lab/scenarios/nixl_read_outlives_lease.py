"""Both engines hang while a request waits for blocks. Its lease ends, and others write there before it reads."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, on, prompt, run, step, step_alone, time_passes

SCENARIO = Scenario(
    schedule=[
        on("decode", "keep_blocks", 0),
        ask("r", prompt(64), 2),
        step(3),
        ask("q", prompt(16, seed=2)),
        time_passes(31.0),
        step_alone("prefill"),
        ask("s", prompt(64, seed=1)),
        step_alone("prefill", 3),
        on("decode", "free_blocks"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="holds other KV",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=20),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
