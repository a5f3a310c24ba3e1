"""The locks of a request with a `cache_salt` are given back under another key, and held until they time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(140), cache_salt="tenant")
    world.run()
    world.admit("r", prompt(140), cache_salt="tenant")  # vLLM has all that is found
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF114",),
    rule="KVR009",
    text="read locks of the server",
    wrong=">=0.4.5,<0.5.1",
    max_num_batched_tokens=256,
)
