"""A miss in the cache, a hit in vLLM: so many tokens at the end of the prompt are computed and not stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(140))
    world.run()
    world.settle()
    world.evict(8)  # vLLM still has the prompt
    world.admit("r", prompt(270))
    world.run()
    world.settle()
    world.expect_stored("r")


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF102",),
        rule="LAB004",
        wrong={"lmcache": ">=0.5.0,<0.5.6"},
        needs={"lmcache": ">=0.5.0"},
        options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF102",),
        rule="LAB004",
        wrong={"vllm": ">=0.32.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=Options(
            connector="mp-in-tree", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256
        ),
    ),
)
