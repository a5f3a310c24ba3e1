"""After a failed load the store runs ahead of the compute: KV that nobody has computed is stored under valid keys.

vLLM had 64 tokens, the cache 128; the load fails and vLLM goes on at 64. The tracker still counts the 128 of the hit
with what is scheduled, so it stores tokens 128 to 192 when 144 are computed. Every later hit on that chunk is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("short", prompt(70))
    world.run()
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(300), max_tokens=2)
    world.step()
    world.step()
    world.lose_loads()  # the load was under way
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF107",),
    rule="KVR008",
    wrong=">=0.4.5",
    max_num_batched_tokens=40,
)
