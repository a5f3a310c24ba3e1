"""A request aborted while its prefetch runs: the server locks what it finds afterwards, and nobody gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140))
    world.step()
    world.abort("r")
    world.admit("next", prompt(200))
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF105",),
    rule="KVR009",
    text="read locks of the server",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    delay=5,
)
