"""Chunks fetched ahead for a request that then loads nothing are never let go: the cache fills up with them.

vLLM has as much of the prompt as LMCache, so nothing is promised and nothing loaded; the fetched chunks keep their
references and pins (LMCache PR 2559). 0.3.10 dies before that, of what mismatch-in-tokens-to-load shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("first", prompt(300))
    world.run()
    world.admit("r", prompt(300))
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF012",),
    rule="KVR009",
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.3.10.post1,<0.4.1"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
