"""A load fails, and before vLLM hears of it the request is preempted: what the failed step has said is kept.

vLLM looks at the requests that run. With asynchronous scheduling the next step is scheduled before the answer of the
last one is there; here another request needs a block for its first token, and there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(96))
    world.fail_load("r")
    world.admit("other", prompt(32, seed=1), max_tokens=4)
    world.admit("r", prompt(100), max_tokens=4)
    world.step()
    world.keep_blocks(0)
    world.step()
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF205",),
    rule="LAB008",
    text="is not what the model says",
    wrong={"vllm": ">=0.11.2"},
    needs={"lmcache": ">=0.4.1"},
    options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
)
