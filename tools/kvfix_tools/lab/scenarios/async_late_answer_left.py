"""A lookup is given up, the request is served without it and ends; then the answer comes: it is kept, chunks and all.

With asynchronous loading the client gives up after `lookup_timeout_ms`, the worker goes on. Nobody cancels the lookup:
the late answer is written down for a request that is gone, and nobody asks for what was fetched (0.4.1 cancels it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(256))
    world.slow_lookups(3)
    world.admit("r", prompt(300))
    world.step()  # match(0): the lookup is sent
    world.wait(4)  # lookup_timeout_ms is 3,000
    world.step()  # match(0): given up; computed, and it ends
    world.slow_lookups(0)
    for seed in (1, 2):  # the answer comes; other lookups would clean up
        world.admit(f"next {seed}", prompt(300, seed))
        world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF011",),
    rule="KVR009",
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.3.10,<0.4.1"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
