"""Each poll of a waiting request counts its hit again as stored: a hole is left, and what follows is unreachable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

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


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF102",),
    rule="KVR007",
    wrong=">=0.4.5,<0.5.6",
    max_num_batched_tokens=256,
)
