"""A client that asks for cache statistics and goes away before its lookup kills EngineCore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    """If EngineCore lives, it serves the next request."""
    asks = {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}
    world.admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": asks}})
    world.abort("r")
    world.admit("next", prompt(140))
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF101",),
    rule="KVR011",
    text="Request tracker for request_id r not found",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
