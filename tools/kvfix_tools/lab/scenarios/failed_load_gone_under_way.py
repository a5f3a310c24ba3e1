"""A load fails, and before vLLM hears of it the request is aborted: its blocks stay in the prefix cache as they are.

vLLM looks at the requests that run. Between a step and its answer one may be aborted, and with asynchronous scheduling
be preempted; its blocks can be found by then, and hold nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(96))
    world.fail_load("before")
    world.admit("before", prompt(100), max_tokens=4)
    world.step()
    world.abort("before")
    world.step()
    world.admit("r", prompt(100), max_tokens=2)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF203",),
    rule="LAB001",
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.4.1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.4.1"},
    options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
)
