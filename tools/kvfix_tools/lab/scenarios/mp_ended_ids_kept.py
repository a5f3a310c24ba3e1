"""The worker remembers the id of every request that has ended, and a request whose id comes again is never freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    for name in ("r", *(f"r{number}" for number in range(80))):
        world.admit(name, prompt(20))
        world.run()
    world.expect_forgotten("r")


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF117",),
    rule="KVR009",
    text="worker_adapter._returned_finished",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
