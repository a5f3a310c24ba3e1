"""A request that does not say from where is aborted before it is scheduled: EngineCore of decode dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, ask, free_blocks, malform, on, prompt, step

SCENARIO = Scenario(
    schedule=[
        malform("no_address"),
        on("decode", "take_blocks", 60),
        ask("r", prompt(64)),
        step(4),
        abort("r"),
        free_blocks(),
        ask("s", prompt(32, seed=1)),
        step(4),
    ],
    rule="KVR011",
    text="KeyError",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
)
