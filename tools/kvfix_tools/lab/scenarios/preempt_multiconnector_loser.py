"""Another connector of a MultiConnector is chosen to load a preempted request, and EngineCore dies on its way back.

vLLM asks all connectors and takes the first that promises something; LMCache's LoadSpec says what it would have loaded,
and `build_connector_meta` asserts it of the resumed request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("r", prompt(1100), max_tokens=8)
    world.step()
    world.preempt("r")
    world.keep_blocks(50)  # 800 tokens stay in the prefix cache, LMCache has 1,024, the other connector 1,088
    world.is_beside("r")
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF002",),
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 1088 but",
    wrong={"lmcache": ">=0.3.10.post1"},
    options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, beside=True),
)
