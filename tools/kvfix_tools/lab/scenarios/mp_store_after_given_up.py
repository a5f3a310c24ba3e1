"""A slow server misses a heartbeat: the worker gives up its store, and the server does it later, of others' KV."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    free_blocks,
    keep_blocks,
    prompt,
    run,
    server_goes_on,
    server_stops,
    settle,
    step,
)

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(200)),
        step(6),  # computed, handed over and ended; vLLM keeps its blocks
        server_stops(),
        step(2),  # the worker reports that the store is done; vLLM frees the blocks
        keep_blocks(0),  # others take them and write to them
        step(),
        server_goes_on(),
        step(4),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="is stored under their key",
    wrong={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.5.6"},
    options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=5),
)
