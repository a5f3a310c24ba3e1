"""A preempted request is promised what LMCache has, no load is started, and it goes on with KV that is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(300), max_tokens=8)
    world.step()
    world.preempt("r")
    world.keep_blocks(10)  # 160 tokens stay in the prefix cache, fewer than the 256 that LMCache has
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF014",),
    rule="KVR006",
    wrong={"lmcache": ">=0.3.9,<0.3.10"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
