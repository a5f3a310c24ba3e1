"""A decode instance (kv_consumer) never takes back the pins of its lookups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(512))
    world.admit("r", prompt(600), max_tokens=2)
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF009",),
    rule="KVR009",
    text="pins of the worker",
    wrong={"lmcache": "<0.4.3"},
    options=Options(chunk_size=256, max_num_batched_tokens=1024, kv_role="kv_consumer"),
)
