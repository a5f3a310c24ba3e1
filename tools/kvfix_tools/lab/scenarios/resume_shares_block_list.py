"""A preempted request goes on, its tracker takes blocks of other tokens for its last ones, and stores their KV.

Tracker and worker keep the same list of the blocks that it came back with. Both add those of the third step; in the
fourth, tokens 384 to 512 are taken to be where 256 to 384 are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("preempted", prompt(520))
    world.step()
    world.preempt("preempted")
    world.run()
    world.reset_prefix_cache()
    world.admit("r", prompt(520))
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF022",),
    rule="LAB001",
    text="the step reads token 384 of",
    wrong={"lmcache": ">=0.3.11"},  # before, what is stored has tokens missing too, and is never asked for (KVF002)
    options=Options(max_num_batched_tokens=128),
)
