"""A load that failed is reported as done without its blocks: vLLM reads what was never loaded. Wrong text, no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140), max_tokens=2)
    world.fail_load("r")
    world.run(60)
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF103",),
    rule="LAB001",
    wrong=">=0.4.5,<0.5.5",
    max_num_batched_tokens=256,
)
