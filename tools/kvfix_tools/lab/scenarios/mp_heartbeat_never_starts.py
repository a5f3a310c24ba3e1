"""After one lookup that timed out the scheduler never asks the server again: its heartbeat never starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("before", prompt(140, seed=1))
    world.step()
    world.lookup_times_out()
    world.run()
    world.step()  # a heartbeat would have found the server by now
    world.admit("r", prompt(140))
    world.run()
    world.settle()
    world.expect_hit("r")


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF112",),
    rule="LAB006",
    wrong={"lmcache": ">=0.5.0,<0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
)
