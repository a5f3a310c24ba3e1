"""After a failed load the tracker holds tokens for which the request has no slots: the worker dies when it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(1536))
    world.admit("r", prompt(1540), max_tokens=2)
    world.fail_load("r", after_chunks=1)
    world.run(20)
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=(),
    rule="KVR011",
    text="wait_for_save: AssertionError",
    # 0.3.9 does not tell vLLM which blocks failed: nothing is taken back, and the request computes on what is not there
    wrong={"lmcache": ">=0.3.10,<=0.3.15"},
    options=Options(num_blocks=110, chunk_size=256, max_num_batched_tokens=2048),
)
