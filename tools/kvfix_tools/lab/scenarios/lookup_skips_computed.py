"""What vLLM has in its prefix cache counts as found in LMCache, and is promised when vLLM has it no more.

The lookup leaves out the chunks that vLLM has computed and adds them to what is found (lmcache_lookup_client.py
0.3.11:190-243); the sum is kept for the next question about the request. LMCache has evicted the 256 tokens, vLLM has
them, and has no room for the request yet; by the time that it has, others have taken those blocks too. The load comes
short, and vLLM computes them again; with kv_load_failure_policy "fail" the request ends with an error. The tokens also
count as stored, so they never are: rule KVR007.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("before", prompt(300))
    world.run()
    world.evict(9)
    world.keep_blocks(20)  # the prefix is among them
    world.admit("r", prompt(600))
    world.step()  # match(288): hit 256, of which LMCache has nothing; no free blocks
    world.keep_blocks(0)
    world.step()  # match(0) from the lookup cache: 256 are promised
    world.free_blocks()
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF019",),
    rule="LAB002",
    wrong={"lmcache": ">=0.3.10.post2,<0.3.12"},
    options=Options(num_blocks=64, chunk_size=256, max_num_batched_tokens=512),
)
