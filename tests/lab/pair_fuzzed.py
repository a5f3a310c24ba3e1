"""Shared by tests of two engines, and of several connectors in one engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt

Plant = Callable[[Any], None]


def nothing(pair: Any) -> None:
    """No fault."""


def three_requests(connector: str, plant: Plant = nothing, at_once: str = "", **options: Any) -> dict[str, Any]:
    """Return the findings and counts of a pair with this fault. The second prompt begins as the first one does.

    at_once: the requests whose prefill and decode are asked for together.
    """
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.lab_engine import EngineDied
    from kvfix_tools.lab.pair.pair import Pair

    with runner.quiet():
        pair = Pair(Options(connector=connector, num_blocks=40, max_num_batched_tokens=64, **options))
        plant(pair)
        with suppress(EngineDied):
            for name, tokens in (("a", prompt(100)), ("b", prompt(150)), ("c", prompt(60, seed=1))):
                if name == "c":
                    pair.step(3)
                (pair.ask_at_once if name in at_once else pair.ask)(name, tokens, 5)
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
        pair.close()
    return {"found": sorted({each.code for each in pair.findings}), "counts": dict(pair.counts)}


def fuzzed(connector: str, plain: bool, mode: str = "fix", seeds: range = range(16)) -> dict[str, Any]:
    """These schedules with the fixes, twice. same: both times alike."""
    from kvfix_tools.lab.fuzz.fuzz_run import Run, fuzz

    first, again = (fuzz(Run(connector, True, plain, mode), seeds, inf, shrinking=0) for _ in range(2))
    return {
        "violations": [violation.message for violation in first.violations],
        "nothing": first.tested_nothing,
        "same": (first.steps, first.counts) == (again.steps, again.counts),
        "counts": first.counts,
    }


def assert_clean(done: dict[str, Any], *happened: str) -> None:
    """`fuzzed` has found nothing, both times, and each of these counts is more than none."""
    assert done["violations"] == []
    assert done["nothing"] == ""
    assert done["same"]
    assert [each for each in happened if not done["counts"].get(each)] == []


def load_other_kv(connector: Any) -> None:
    """A fault: each chunk that LMCache loads has other KV."""
    cache = connector.cache_engines[0]
    chunk = cache.chunk
    cache.chunk = lambda name, key: [7] * len(chunk(name, key) or ()) or None


def copy_the_next_block(offloading: Any) -> None:
    """A fault: the SimpleCPUOffloadConnector copies the block behind the one that is to be copied."""
    slots = offloading.ranks[0].copies._slots
    read = slots.read
    slots.read = lambda numbers, *more: read([(number + 1) % len(slots) for number in numbers], *more)


def read_the_next_block(agent: Any) -> None:
    """A fault: each of the agent's transfers is from the block behind the one that is asked for, or to it."""
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, here, theirs, [each + 1 for each in there], **more
    )


def write_into_the_next_block(pair: Any) -> None:
    """A fault: what Mooncake writes to the peer lies one block further on."""
    network, write = pair.network, pair.network.write
    from kvfix_tools.lab.connectors.nixl import FLOATS

    block = pair.options.block_size * FLOATS * 4

    def shifted(of: Any, to: str, sources: list[int], targets: list[int], sizes: list[int]) -> Any:
        return write(of, to, sources, [target + block for target in targets], sizes)

    network.write = shifted


def leases_are_over_at_once(pair: Any) -> None:
    """A fault: each lease has ended when the worker's step has begun."""
    worker = pair.prefill.connector.workers[0].adapter
    start = worker.start_load_kv

    def start_load_kv(metadata: Any) -> None:
        start(metadata)
        worker._reqs_to_send.update(dict.fromkeys(worker._reqs_to_send, 0.0))

    worker.start_load_kv = start_load_kv
