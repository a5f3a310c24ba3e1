"""A miss in the cache, a hit in vLLM: so many tokens at the end of the prompt are computed and not stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

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


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF102",),
    rule="LAB004",
    wrong=">=0.4.5,<0.5.6",
    max_num_batched_tokens=256,
)
