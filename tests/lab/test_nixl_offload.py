"""NixlConnector and the OffloadingConnector in a MultiConnector: both load, and wrong KV of either is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once

Plant = Callable[[Any], None]


def nothing(pair: Any) -> None: ...


def other_kv_comes_from_the_cpu(pair: Any) -> None:
    copies = pair.decode.connector.offloading.ranks[0].copies
    swap = copies._swap
    copies._swap = lambda source, to, sizes, **more: swap(source.flip(0), to, sizes, **more)
    handler = pair.decode.connector.offloading.ranks[0].connector.worker._load_handler
    handler._swap_blocks_batch = copies._swap


def nixl_reads_the_next_block(pair: Any) -> None:
    agent = pair.decode.connector.workers[0].adapter.nixl_wrapper
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, here, theirs, [each + 1 for each in there], **more
    )


def planted(plant: str, offloading: str) -> dict[str, Any]:
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.lab_engine import EngineDied
    from kvfix_tools.lab.pair import Pair

    options = Options(
        connector="nixl-offload",
        offloading=offloading,
        num_blocks=40,
        chunk_size=16,
        max_num_batched_tokens=64,
        prefix_caching=True,
    )
    with runner.quiet():
        pair = Pair(options)
        globals()[plant](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.run()
            pair.step(5)
            for name in ("prefill", "decode"):
                pair.on(name, "reset_prefix_cache")
            pair.router.ask_decode("b", prompt(100), 5)  # decode's CPU memory has it
            pair.run()
            for name in ("prefill", "decode"):
                pair.on(name, "reset_prefix_cache")
            pair.ask("c", prompt(100), 5)  # and so has prefill's
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    counts = {name: dict(each.counts) for name, each in (("prefill", pair.prefill), ("decode", pair.decode))}
    return {"found": sorted({each.code for each in pair.findings}), "counts": counts}


@pytest.mark.parametrize("offloading", ["first", "last"])
def test_both_load(offloading: str, once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "nothing", offloading)
    assert done["found"] == []
    prefill, decode = done["counts"]["prefill"], done["counts"]["decode"]
    assert prefill["loads_offloaded"] == 1
    assert prefill["stores_offloaded"] > 0
    # the third one is in decode's CPU memory and on the way from prefill: the first that is asked loads it
    loads = decode["loads_of_kv_consumer"], decode["loads_offloaded"]
    assert loads == ((1, 2) if offloading == "first" else (2, 1))


@pytest.mark.parametrize("plant", ["other_kv_comes_from_the_cpu", "nixl_reads_the_next_block"])
def test_wrong_kv_of_either_is_seen(plant: str, once: Once) -> None:
    assert "LAB001" in once(planted, RELEASES / "0.5.6", plant, "last")["found"]


def fuzzed(plain: bool) -> dict[str, Any]:
    from kvfix_tools.lab.fuzz_run import Run, fuzz

    first, again = (fuzz(Run("nixl-offload", True, plain), range(5, 13), inf, shrinking=0) for _ in range(2))
    return {
        "violations": [violation.message for violation in first.violations],
        "nothing": first.tested_nothing,
        "same": (first.steps, first.counts) == (again.steps, again.counts),
        "counts": first.counts,
    }


@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(plain: bool, once: Once) -> None:
    done = once(fuzzed, RELEASES / "0.5.6", plain)
    assert done["violations"] == []
    assert not done["nothing"]
    assert done["same"]
    assert done["counts"]["loads_offloaded"] > 0
