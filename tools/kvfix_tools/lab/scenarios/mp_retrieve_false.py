"""A load that failed is reported as done without its blocks: vLLM reads what was never loaded. Wrong text, no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140), max_tokens=2)
    world.fail_load("r")
    world.run(60)
    world.settle()


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF103",),
        rule="LAB001",
        wrong={"lmcache": ">=0.5.0,<0.5.5"},
        needs={"lmcache": ">=0.5.0"},
        options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF103",),
        rule="LAB001",
        wrong={"vllm": ">=0.22.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=Options(
            connector="mp-in-tree", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256
        ),
    ),
)
