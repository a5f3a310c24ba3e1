"""Two adapters share KV through the multi-process server: the name of a LoRA is no part of the cache key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(140), lora_request=lora("one"))
    world.run()
    world.admit("r", prompt(140), max_tokens=2, lora_request=lora("other"))
    world.run()
    world.settle()


def lora(name: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, len(name), name)


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF111",),
    rule="LAB001",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
