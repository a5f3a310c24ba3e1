"""A model with a sliding window: the load of a request fails, its connector reports blocks, and EngineCore dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, expect_unharmed, lose_loads, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(200), max_tokens=2),
        step(2),
        lose_loads(),  # the load was in flight
        run(),
        expect_unharmed("r"),
        settle(),
    ],
    rule="KVR011",
    text="RuntimeError",
    wrong={"lmcache": ">=0.4.7,<0.5.6", "vllm": ">=0.32"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, windows=(64,)),
)
