"""The whole prompt is hit, and asked a second time the connector promises all of it: nothing is left to compute.

200 tokens, all in LMCache. The first answer is 199, since the last token has to be computed for its logits; there are
too few blocks; the second is 200, and vLLM asserts that there are new tokens (scheduler.py 0.32.0:1170).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(200))
    world.run()
    world.reset_prefix_cache()
    world.take_blocks(world.free())
    world.admit("r", prompt(200), max_tokens=2)
    world.step()  # match(0) by a lookup
    world.step()  # match(0) from the lookup cache
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF001",),
    rule="KVR001",
    wrong={"lmcache": "==0.3.10"},
    options=Options(block_size=8, num_blocks=40, chunk_size=40, max_num_batched_tokens=256),
)
