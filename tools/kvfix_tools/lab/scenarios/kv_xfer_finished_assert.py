"""A request is aborted while it is loaded: load and request are both reported done, and vLLM asserts on the second.

vLLM frees the request at the first report and looks for it at the other (scheduler.py 0.32.0:3222-3235).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140), max_tokens=4)
    for _ in range(5):
        world.step()
    world.abort("r")
    world.admit("next", prompt(200))  # if EngineCore lives, it serves the next one
    world.run()
    world.settle()


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF201",),
    rule="KVR011",
    text="update_from_output: AssertionError",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    delay=4,
)
