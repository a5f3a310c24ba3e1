"""Two requests with one prompt come in one step; the load of the first fails, it is aborted; the second counts on it.

A load within the step is in vLLM's prefix cache before it is done, so the second shares its blocks. After the failure
only the first goes back to compute them (vLLM 0.32 scheduler.py:3295).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(96))
    world.admit("first", prompt(100))
    world.admit("r", prompt(104), max_tokens=2)
    world.fail_load("first", after_chunks=1)
    world.step()
    world.abort("first")
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF204",),
    rule="LAB001",
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
