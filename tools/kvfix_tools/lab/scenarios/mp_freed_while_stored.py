"""A request with two stores is reported done at the end of the first: its blocks are freed while they are copied.

The first chunk is stored early and done; the last one is still being copied when the request ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(256))
    while not world.requests["r"].is_finished():
        world.step()
    world.step()  # the worker hears of it, and answers
    world.keep_blocks(0)  # others take its blocks and write to them
    for _ in range(4):
        world.step()
    world.free_blocks()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF109",),
    rule="LAB001",
    text="is stored under their key",
    wrong=">=0.4.5",
    max_num_batched_tokens=16,
    delay=3,
)
