"""After a failed load the store runs ahead of the compute: KV that nobody has computed is stored under valid keys.

vLLM had 64 tokens, the cache 128; the load fails and vLLM goes on at 64. The tracker still counts the 128 of the hit
with what is scheduled, so it stores tokens 128 to 192 when 144 are computed. Every later hit on that chunk is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

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


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF107",),
        rule="KVR008",
        wrong={"lmcache": ">=0.5.0"},
        needs={"lmcache": ">=0.5.0"},
        options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=40),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF107",),
        rule="KVR008",
        wrong={"vllm": ">=0.32.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=Options(connector="mp-in-tree", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=40),
    ),
)
