"""A preempted request all of whose tokens are in LMCache comes back with one token less than is asserted.

Another request whose prompt is this one with what was generated since has stored them. The last token has to be
computed again, so 255 of 256 are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, continued, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(continued(prompt(250), 6))
    world.admit("r", prompt(250), max_tokens=16)
    for _ in range(6):
        world.step()
    world.preempt("r")
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF002",),
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 255 but",
    wrong={"lmcache": ">=0.3.10.post1,<0.4.3"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
