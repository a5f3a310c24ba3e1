"""A store is under way, its request is preempted, others write to its blocks: their KV is stored under its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(200), max_tokens=20)
    world.step()
    world.step()
    world.step()
    world.step()
    world.step()  # computed and handed over; the server copies some steps later
    world.preempt("r")
    world.keep_blocks(0)  # others take its blocks and write to them
    world.step()
    world.step()
    world.step()
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF106",),
    rule="LAB001",
    text="is stored under their key",
    wrong=">=0.4.5,<0.5.6",
    num_blocks=50,
    max_num_batched_tokens=1024,
    delay=3,
)
