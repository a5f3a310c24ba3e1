"""A load fails, and requests that only share computed blocks with it are failed with it.

The load begins with a chunk of which vLLM has the first blocks; those are reported as failed too, and another request
is running on them. With vLLM's default, `kv_load_failure_policy=fail`, that request ends with an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.scenario import both, prompt

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


SCENARIO = both(
    __name__,
    __doc__,
    play,
    fixes=("KVF110",),
    rule="LAB005",
    request="other",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    kv_load_failure_policy="fail",
)
