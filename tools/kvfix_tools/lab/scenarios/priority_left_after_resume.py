"""A preempted request is looked up again, and the priority kept for that is never taken out."""

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
    world.keep_blocks(10)  # 160 tokens stay in the prefix cache, fewer than LMCache has
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF005",),
    rule="KVR009",
    text="_requests_priority",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
