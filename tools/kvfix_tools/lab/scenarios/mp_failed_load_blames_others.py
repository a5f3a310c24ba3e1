"""A load fails, and requests that only share computed blocks with it are failed with it.

The load begins with a chunk of which vLLM has the first blocks; those are reported as failed too, and another request
is running on them. With vLLM's default, `kv_load_failure_policy=fail`, that request ends with an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("other", prompt(90), max_tokens=20)  # five blocks, one chunk
    for _ in range(4):
        world.step()
    world.stored_elsewhere(prompt(128))
    world.admit("r", prompt(140))  # five blocks are here, the second chunk is loaded
    world.step()
    world.step()
    world.lose_loads()
    world.expect_unharmed("other")
    world.run()
    world.settle()


def _options(connector: str) -> Options:
    return Options(
        connector=connector,
        block_size=16,
        num_blocks=60,
        chunk_size=64,
        max_num_batched_tokens=256,
        kv_load_failure_policy="fail",
    )


SCENARIO = (
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF110",),
        rule="LAB005",
        request="other",
        wrong={"lmcache": ">=0.5.0"},
        needs={"lmcache": ">=0.5.0"},
        options=_options("mp"),
    ),
    Scenario(
        __name__,
        __doc__,
        play,
        fixes=("KVF110",),
        rule="LAB005",
        request="other",
        wrong={"vllm": ">=0.32.0", "lmcache": "==0.4.6"},
        needs={"lmcache": "==0.4.6"},
        options=_options("mp-in-tree"),
    ),
)
