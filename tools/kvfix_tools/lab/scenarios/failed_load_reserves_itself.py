"""A load failed, the request is to be loaded again: vLLM keeps blocks back for it, from itself, and it never starts.

vLLM admits a load only if the free blocks are more than all prefills in flight still need (scheduler.py 0.32.0:1249).
A request whose load failed gives its blocks back and stays among them.
"""

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
    world.fail_load("r")
    world.run(200)
    if world.scheduler.has_unfinished_requests():
        world.never_ends()
    else:
        world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF202",),
    rule="LAB003",
    wrong={"vllm": ">=0.26.0", "lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=16, chunk_size=64, max_num_batched_tokens=256),
)
