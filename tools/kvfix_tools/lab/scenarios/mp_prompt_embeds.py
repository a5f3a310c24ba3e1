"""Two prompts given as embeddings of the same length share KV: their key is made of the zeros that stand for tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    import torch

    world.admit("before", None, prompt_embeds=torch.zeros(140, 64))
    world.run()
    world.reset_prefix_cache()
    world.admit("r", None, max_tokens=2, prompt_embeds=torch.ones(140, 64))
    world.run()
    world.admit("next", [7] * 140)
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF108",),
    rule="LAB001",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
