"""A preempted request goes on, is left out of a step, and computes in blocks that it has used already.

Tracker and worker keep the same list of the blocks that it came back with, and both have added those of its tokens 256
to 384. When it joins the batch again the worker takes its blocks from there: tokens 384 to 512 go where 256 to 384 are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("other", prompt(1, seed=1), max_tokens=20)
    world.budget(129)
    world.admit("r", prompt(520))
    world.step()
    world.preempt("r")
    world.step()
    world.step()
    world.budget(1)  # the other one has it
    world.step()
    world.budget(129)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF022",),
    rule="LAB001",
    text="the step reads token 256 of 512",
    wrong={"lmcache": ">=0.3.10"},
    options=Options(max_num_batched_tokens=129),
)
