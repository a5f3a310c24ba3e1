"""A slow server misses a heartbeat: the worker gives up its load, and the server does it later, into others' blocks."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, server_goes_on, server_stops, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140)),
        step(5),  # looked up, found, granted; the load is in flight
        server_stops(),
        step(2),  # the worker reports that the load has failed; vLLM frees the blocks
        admit("other", prompt(200, seed=1), max_tokens=10),
        admit("another", prompt(200, seed=2), max_tokens=10),
        step(2),
        server_goes_on(),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="computed ones, its slot holds other KV",
    wrong={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.5.6"},
    options=Options(connector="mp", num_blocks=28, max_num_batched_tokens=1024, delay=3),
)
