"""SimpleCPUOffloadConnector and LMCache's connector in a MultiConnector: both load, wrong KV of either is seen."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed
from tests.lab.pair_fuzzed import nothing  # noqa: F401  planted by its name


def lmcache_loads_other_kv(engine: Any) -> None:
    pair_fuzzed.load_other_kv(engine.connector)


def copies_take_the_next_block(engine: Any) -> None:
    pair_fuzzed.copy_the_next_block(engine.connector.offloading)


def a_hit_is_never_released(engine: Any) -> None:
    """LMCache, which is asked first, has the request: the other one's hit is not used."""
    engine.connector.offloading._manager._free_pending_cpu_hit = lambda pending: None


def a_load_keeps_its_request(engine: Any) -> None:
    manager = engine.connector.offloading._manager
    manager.request_finished = lambda request, block_ids: (False, None)


def planted(plant: str, offloading: str) -> dict[str, Any]:
    """LMCache has two prompts, the SimpleCPUOffloadConnector one of them, and another that LMCache has lost."""
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine

    options = Options(
        offloading=offloading, simple_offloading=True, num_blocks=40, chunk_size=32, max_num_batched_tokens=64
    )
    with runner.quiet():
        engine = LabEngine(options)
        globals()[plant](engine)
        with suppress(EngineDied):
            engine.do("stored_elsewhere", prompt(100))
            engine.admit("of lmcache", prompt(100), 5)
            engine.run()
            engine.reset_prefix_cache()
            engine.admit("of both", prompt(100), 5)
            engine.run()
            engine.admit("stored", prompt(150, seed=1), 5)
            engine.run()
            engine.reset_prefix_cache()
            engine.evict(100)
            engine.admit("of the other", prompt(150, seed=1), 5)
            engine.run()
            engine.expect_all_ended()
    return {"found": sorted({each.code for each in engine.findings}), "counts": dict(engine.counts)}


@pytest.mark.parametrize("offloading", ["first", "last"])
def test_both_load(offloading: str, once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "nothing", offloading)
    assert done["found"] == []
    counts = done["counts"]
    # what both have is loaded by the first that is asked
    loads = counts["loads_offloaded"], counts["loads_of_kv_both"]
    assert loads == ((2, 1) if offloading == "first" else (1, 2))


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        ("lmcache_loads_other_kv", "LAB001"),
        ("copies_take_the_next_block", "LAB001"),
        ("a_hit_is_never_released", "LAB028"),
        ("a_load_keeps_its_request", "KVR009"),
    ],
)
def test_planted(plant: str, rule: str, once: Once) -> None:
    assert rule in once(planted, RELEASES / "0.5.6", plant, "last")["found"]


def fuzzed(seeds: int) -> dict[str, Any]:
    """Those of so many seeds that have both, with the fixes."""
    from collections import Counter

    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.fuzz_run import Run, applied

    found, counts = [], Counter[str]()
    with applied(True, "check"):
        for schedule in Run("v1", True).schedules(range(seeds)):
            if schedule.options.simple_offloading:
                done = play(schedule)
                found += [str(each) for each in done.violations]
                counts.update(done.counts)
    return {"found": found, "counts": dict(counts)}


def test_fuzzed_schedules_are_clean_with_the_fixes(once: Once) -> None:
    done = once(fuzzed, RELEASES / "0.5.6", 400)
    assert done["found"] == []
    happened = ("loads_offloaded", "passed_over", "loads_failed", "evicted", "preemptions", "full_steps", "inputs")
    assert [each for each in happened if not done["counts"][each]] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"connector": "mp", "offloading": "last"},
        {"offloading": ""},
        {"offloading": "last", "prefix_caching": False},
        {"offloading": "last", "ranks": 2},
    ],
    ids=str,
)
def test_what_is_not_played_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SimpleCPUOffloadConnector|one rank"):
        Options(**{"simple_offloading": True, **wrong})
