"""A worker does not answer, and every step of the scheduler waits the whole timeout for the same request's lookup.

There is no room for the request, so vLLM asks for it on every step; a lookup that timed out is not remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.lookups_fail(4)
    world.take_blocks(world.free())
    world.admit("r", prompt(300))
    for _ in range(4):
        world.step()
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF015",),
    rule="KVR012",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
