"""A request that vLLM computes itself is loaded all the same, into blocks in use; EngineCore dies when that is done.

With `prompt_logprobs` vLLM reads no cache, its own or another. The connector is asked all the same, and told that
nothing is granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1})
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF115",),
    rule="KVR004",
    # before vLLM 0.31 such a request takes what the connector has
    wrong={"vllm": ">=0.31.0", "lmcache": ">=0.4.5,<0.5.5"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256, delay=0),
)
