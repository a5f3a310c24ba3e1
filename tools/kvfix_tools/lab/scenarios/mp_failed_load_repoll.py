"""A request whose load failed is promised the same tokens again, nobody loads them, and it waits for ever.

The worker loses the server for a moment: that is the failure that these releases report. (For the other they do not,
see mp-retrieve-false.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140), max_tokens=2)
    for _ in range(6):  # the load is under way
        world.step()
    world.lose_loads()
    world.run(60)
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF104",),
    rule="KVR010",
    wrong=">=0.4.5,<0.5.5",
    max_num_batched_tokens=256,
    delay=4,
)
