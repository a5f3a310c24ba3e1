"""A slow server misses a heartbeat while a store is in flight, and its request is preempted: the worker does not wait.

Others write to the blocks, and the server stores that under the request's keys when it goes on.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    free_blocks,
    keep_blocks,
    preempt,
    prompt,
    run,
    server_goes_on,
    server_stops,
    settle,
    step,
)

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(200), max_tokens=20),
        step(5),  # computed and handed over
        server_stops(),
        step(),  # the worker takes the server for dead
        preempt("r"),
        keep_blocks(0),  # others take its blocks and write to them
        step(2),
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
    options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=9),
)
