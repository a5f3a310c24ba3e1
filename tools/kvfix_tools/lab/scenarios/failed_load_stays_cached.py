"""Blocks whose load failed stay in vLLM's prefix cache, and the next request reads them: wrong text, no error.

With kv_load_failure_policy=recompute vLLM leaves them there, since the request is to compute them again at once
(scheduler.py 0.32.0:3412). If it is aborted or preempted before that, nobody does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(96))
    world.admit("before", prompt(100), max_tokens=4)
    world.fail_load("before")
    world.step()
    world.abort("before")
    world.admit("r", prompt(100), max_tokens=2)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF203",),
    rule="LAB001",
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
