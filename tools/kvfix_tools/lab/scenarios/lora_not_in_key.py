"""Two adapters share KV: the name of a LoRA is no part of the cache key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(600), lora_request=lora("one"))
    world.run()
    world.admit("r", prompt(600), max_tokens=2, lora_request=lora("other"))
    world.run()
    world.settle()


def lora(name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, len(name), name)


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF017",),
    rule="LAB001",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
)
