"""A request that reads no cache is looked up all the same, and what it locks stays locked until that times out.

With `prompt_logprobs` vLLM reads no cache. It admits the request before the lookup is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1})
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF116",),
    rule="KVR009",
    text="read locks of the server",
    wrong=">=0.4.5",
    vllm=">=0.31.0",  # before, such a request takes what the connector has
    max_num_batched_tokens=256,
)
