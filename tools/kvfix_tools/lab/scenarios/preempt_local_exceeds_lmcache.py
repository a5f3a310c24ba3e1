"""A preempted request of which vLLM has more than LMCache dies on its way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(1000), max_tokens=8)
    world.step()
    world.preempt("r")
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF002",),
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 992 but lmcache_cached_tokens 768",
    wrong={"lmcache": ">=0.3.10.post1,<=0.3.10.post2"},
    options=Options(num_blocks=80, chunk_size=256, max_num_batched_tokens=2048),
)
