"""A capped load on top of a prefix hit that is no multiple of the chunk: promise and LoadSpec differ.

max_tokens_per_load 1024, 80 tokens in vLLM: the promise is 1,024, the LoadSpec ends at 1,024, and
`update_state_after_alloc` finds 1,024 promised where 1,024 - 80 is due. No preemption is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(1500))
    world.run()
    world.reset_prefix_cache()
    world.admit("short", prompt(80))
    world.run()
    world.admit("r", prompt(1500), max_tokens=2)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF003",),
    rule="KVR011",
    text="Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens in vllm)",
    wrong={"lmcache": ">=0.4.7"},
    options=Options(num_blocks=120, chunk_size=256, max_num_batched_tokens=2048, lmcache={"max_tokens_per_load": 1024}),
    needs={"lmcache": ">=0.4.7"},
)
