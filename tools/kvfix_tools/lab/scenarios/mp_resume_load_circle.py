"""A preempted request is resumed with a load that fails: it is looked up and loaded in a circle, and never runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(140), max_tokens=8)
    for _ in range(6):
        world.step()
    world.preempt("r")
    world.keep_blocks(0)  # vLLM's own prefix cache has none of it when it comes back
    world.step()
    world.free_blocks()
    for _ in range(40):
        world.fail_load("r")
        if world.scheduler.has_unfinished_requests():
            world.step()
    if world.scheduler.has_unfinished_requests():
        world.never_ends()
    else:
        world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF104",),
    rule="LAB003",
    wrong={"lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
)
