"""A request does not say from where it is to load: it was promised, and waits for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import ask, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("no_address"),
        ask("r", prompt(64)),
        run(),
    ],
    rule="KVR010",
    text="never started",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
)
