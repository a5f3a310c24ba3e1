"""Each poll of a waiting request counts its hit again as stored: a hole is left, and what follows is unreachable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.keep_blocks(4)
    world.admit("r", prompt(800), max_tokens=2)
    for _ in range(4):  # the lookup, then three polls without enough blocks
        world.step()
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF102",),
        rule="KVR007",
        wrong={"lmcache": ">=0.5.0,<0.5.6"},
        needs={"lmcache": ">=0.5.0"},
        options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF102",),
        rule="KVR007",
        wrong={"vllm": ">=0.22.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=Options(
            connector="mp-in-tree", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256
        ),
    ),
)
