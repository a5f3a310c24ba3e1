"""A prompt given as embeddings has no token ids, and EngineCore dies counting them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    import torch

    world.admit("r", None, max_tokens=2, prompt_embeds=torch.zeros(300, 64))
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF006",),
    rule="KVR011",
    text="schedule: ",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(chunk_size=256, max_num_batched_tokens=1024),
)
