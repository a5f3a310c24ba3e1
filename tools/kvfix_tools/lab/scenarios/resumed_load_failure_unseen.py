"""A request is preempted, comes back with a load, and that fails: vLLM does not see it and computes on top of nothing.

vLLM looks for failed blocks among what was cached when the request was first scheduled (scheduler.py 0.15.1:2007).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(100), max_tokens=4)
    world.step()
    world.preempt("r")
    world.reset_prefix_cache()
    world.fail_load("r")
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF206",),
    rule="LAB001",
    text="its slot holds other KV",
    wrong={"vllm": ">=0.11.2,<0.20"},
    needs={"lmcache": ">=0.3.10"},  # before, a resumed request loads nothing
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
