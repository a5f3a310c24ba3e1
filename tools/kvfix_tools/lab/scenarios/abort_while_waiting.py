"""A request aborted after its lookup and before its admission leaves LoadSpec, hit, priority and pins behind.

The pins keep chunks from being evicted until they time out (300 s).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(600))
    world.run()
    world.reset_prefix_cache()
    world.keep_blocks(0)
    world.admit("r", prompt(600), max_tokens=2)
    world.step()
    world.abort("r")
    world.free_blocks()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF005",),
    rule="KVR009",
    wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
