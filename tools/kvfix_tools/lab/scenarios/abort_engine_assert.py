"""The first client that goes away kills EngineCore: a bare assertion that the scheduler has a cache engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(300), max_tokens=8)
    world.step()
    world.abort("r")
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF004",),
    rule="KVR011",
    text="finish_requests: AssertionError",
    wrong={"lmcache": ">=0.4.5,<0.5.1"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
