"""With asynchronous scheduling the tracker leaves out what is generated, and a later token comes to the wrong place.

LMCache to 0.4.2 adds the tokens from the computed ones on; the one there is under way and not known yet. It is known
where the request has sat out a step, here for want of budget: then it is added behind those that the tracker has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("other", prompt(20, seed=1), max_tokens=9)
    world.admit("r", prompt(43), max_tokens=9)
    world.step()
    world.step()
    world.budget(1)
    world.step()
    world.step()
    world.budget(128)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF024",),
    rule="LAB001",
    text="not the first ones",
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.10,<0.4.3"},
    needs={"lmcache": ">=0.3.10"},
    options=Options(block_size=4, chunk_size=4, async_scheduling=True, lmcache={"save_decode_cache": True}),
)
