"""A request aborted between its lookup and its admission keeps the read locks of the server until they time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.keep_blocks(0)
    world.admit("r", prompt(140))
    world.step()
    world.step()
    world.step()
    world.abort("r")
    world.free_blocks()
    world.admit("next", prompt(200))
    world.run()
    world.settle()


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF105",),
        rule="KVR009",
        text="read locks of the server",
        wrong={"lmcache": ">=0.5.0"},
        needs={"lmcache": ">=0.5.0"},
        options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF105",),
        rule="KVR009",
        text="read locks of the server",
        wrong={"vllm": ">=0.22.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=Options(
            connector="mp-in-tree", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256
        ),
    ),
)
