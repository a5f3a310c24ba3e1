"""What tests of a pair of engines, and of connectors beside each other, have in common."""

from __future__ import annotations

from math import inf
from typing import Any


def fuzzed(connector: str, plain: bool, mode: str = "fix", seeds: range = range(16)) -> dict[str, Any]:
    """These schedules with the fixes, twice. same: both times alike."""
    from kvfix_tools.lab.fuzz_run import Run, fuzz

    first, again = (fuzz(Run(connector, True, plain, mode), seeds, inf, shrinking=0) for _ in range(2))
    return {
        "violations": [violation.message for violation in first.violations],
        "nothing": first.tested_nothing,
        "same": (first.steps, first.counts) == (again.steps, again.counts),
        "counts": first.counts,
    }


def load_other_kv(connector: Any) -> None:
    """A fault: each chunk that LMCache loads has other KV."""
    cache = connector.cache_engines[0]
    chunk = cache.chunk
    cache.chunk = lambda name, key: [7] * len(chunk(name, key) or ()) or None


def read_the_next_block(agent: Any) -> None:
    """A fault: each of the agent's transfers is from the block behind the one that is asked for."""
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, here, theirs, [each + 1 for each in there], **more
    )


def write_into_the_next_block(pair: Any) -> None:
    """A fault: what Mooncake writes to the peer lies one block further on."""
    network, write = pair.network, pair.network.write
    from kvfix_tools.lab.nixl import FLOATS

    block = pair.options.block_size * FLOATS * 4

    def shifted(of: Any, to: str, sources: list[int], targets: list[int], sizes: list[int]) -> Any:
        return write(of, to, sources, [target + block for target in targets], sizes)

    network.write = shifted
