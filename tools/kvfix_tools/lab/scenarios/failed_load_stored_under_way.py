"""A load fails while the next step is under way, and what that step computes on top of it is stored for others.

With asynchronous scheduling a step is scheduled before the answer of the last one is there. 128 tokens are promised of
320, 64 are computed in a step: the load brings none, and the second step stores what it has computed after the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.fail_load("first")
    world.admit("first", prompt(320))
    world.run()
    world.reset_prefix_cache()
    world.admit("r", prompt(324), max_tokens=4)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF007",),
    rule="LAB001",
    wrong={"vllm": ">=0.11.2"},
    # before 0.4.1 LMCache dies of such a request (KVF008)
    needs={"lmcache": ">=0.4.1"},
    options=Options(max_num_batched_tokens=64, async_scheduling=True),
)
