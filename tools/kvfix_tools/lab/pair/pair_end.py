"""The expectations at the end of a run with two engines (pair.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.engine import rules

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair


def expect_all_ended(pair: Pair) -> bool:
    """After many steps with free blocks: expect that all requests have ended, and that no state outlives the leases."""
    for engine in pair.engines:
        if engine.scheduler.has_unfinished_requests():
            engine.request_events.never_end()
            return False
    for _ in range(2):  # late messages are kept for a timeout too
        pair.time_passes(pair.longest() + 1.0)
        slowest = pair.network.delay + pair.options.rank_delay
        for _ in range(4 + 4 * slowest + pair.network.writers_take):
            pair.tick()
            for engine in pair.engines:
                engine.iterate()
    for engine in pair.engines:
        held = engine.options.num_blocks - 1 - engine.free()
        if held:
            engine.request_events.violated(
                rules.BLOCKS_HELD,
                "",
                f"{held} blocks are held, and all requests of the {engine.name} engine have ended",
            )
        for request in sorted(engine.connector.kept_of_peer()):
            engine.request_events.violated(rules.KEPT_OF_PEER, request, f"the {engine.name} engine keeps it")
        engine.request_events.leaked()
    return True
