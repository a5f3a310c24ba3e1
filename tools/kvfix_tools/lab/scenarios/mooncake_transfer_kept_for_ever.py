"""A request of decode names a transfer that prefill has not: prefill keeps an entry of it for ever."""

from kvfix_tools.lab.scenario import MEMORY, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[malform("other_transfer"), ask("r", prompt(64)), run(), expect_all_ended()],
    rule="LAB022",
    text="the prefill engine keeps it",
    request="other",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=MEMORY,
)
