"""A router sends a request to decode again while its KV is written: the second one waits for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[ask("r", prompt(64), 2), step(6), send_again("r"), run(), expect_all_ended()],
    rule="LAB003",
    text="for ever",
    request="r-00000003",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60, delay=5),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
