"""A kv_producer, whose worker stores what its metadata say not to (0.5.6 vllm_v1_adapter.py:1152)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import RELEASES, Once

#: A request is preempted in its decode phase. vLLM has all of its prompt, and LMCache by then half of it.
PLAY = """
import kvfix
from kvfix_tools.lab import scenario
from kvfix_tools.lab.options import Options
with runner.quiet():
    from kvfix_tools.lab.world import World
    kvfix.revert()
    if {fixes}:
        kvfix.apply()
    options = Options(kv_role="kv_producer", block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)
    world = World(options)
    world.admit("r", scenario.prompt(128), max_tokens=8)
    for _ in range(3):
        world.step()
    result = [len(world.cache)]
    world.evict(4)
    result.append(len(world.cache))
    world.preempt("r")
    world.run()
    result.append(len(world.cache))
    kvfix.revert()
"""


@pytest.mark.parametrize("name", ["0.4.6", "0.5.6"])
@pytest.mark.parametrize("fixes", [False, True], ids=["released", "fixed"])
def test_a_resumed_request_leaves_no_hole(fixes: bool, name: str, once: Once) -> None:
    """Chunks that are cached: before, when some were evicted, and when it has ended."""
    found: Any = once(PLAY.format(fixes=fixes), RELEASES / name)
    assert found == [8, 4, 8]
