"""vLLM's SimpleCPUOffloadConnector in the lab: faults planted in it are found, and its threads go on (KVF370)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix.session import session
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed

OPTIONS = Options(connector="simple-offload", block_size=16, num_blocks=40, max_num_batched_tokens=64, delay=2)


def copies_take_the_next_block(engine: Any) -> None:
    pair_fuzzed.copy_the_next_block(engine.connector)


def a_load_is_reported_before_it_is_done(engine: Any) -> None:
    engine.connector.ranks[0].copies.is_done = lambda copy: True


def a_store_holds_no_blocks(engine: Any) -> None:
    """Others get the blocks while they are copied."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    manager = engine.connector.in_scheduler.scheduler_manager
    manager._gpu_block_pool = SimpleNamespace(
        blocks=pool.blocks, touch=lambda blocks: None, free_blocks=lambda blocks: None,
        cached_block_hashes_by_block=pool.cached_block_hashes_by_block,
    )  # fmt: skip


def a_hit_is_never_released(engine: Any) -> None:
    manager = engine.connector.in_scheduler.scheduler_manager
    ask = manager.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
        answer = ask(request, computed)
        manager._pending_cpu_hits.setdefault(request.request_id, (([],), 0, computed))
        return answer

    manager.get_num_new_matched_tokens = get_num_new_matched_tokens
    manager.request_finished_all_groups = lambda request, blocks: (False, None)


def a_load_ends_a_block_early(engine: Any) -> None:
    reader = engine.connector.reader
    loads = reader.loads
    reader.loads = lambda metadata: [(name, start, end - 16) for name, start, end in loads(metadata)]


def a_load_is_lost(engine: Any) -> None:
    """The worker is told of no load."""
    build = engine.connector.in_scheduler.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        metadata = build(output)
        metadata.load_cpu_blocks, metadata.load_event = [], -1
        return metadata

    engine.scheduler.connector.build_connector_meta = build_connector_meta


def a_load_holds_its_memory_for_ever(engine: Any) -> None:
    manager = engine.connector.in_scheduler.scheduler_manager
    manager._cleanup_load_request = lambda name: manager._reqs_to_load.pop(name, None) and 0


FAULTS: dict[Callable[[Any], None], tuple[str, ...]] = {
    copies_take_the_next_block: ("LAB001",),
    a_load_is_reported_before_it_is_done: ("LAB001",),
    a_store_holds_no_blocks: ("LAB001", "KVR011"),
    a_hit_is_never_released: ("KVR009",),
    a_load_ends_a_block_early: ("KVR004", "LAB002"),
    a_load_holds_its_memory_for_ever: ("LAB028",),
    a_load_is_lost: ("KVR006", "KVR010", "LAB003"),
}


def played(plant: Callable[[Any], None] = lambda _: None) -> tuple[list[str], dict[str, int]]:
    """Play stores, loads, and blocks that are freed while they are copied. Return findings and counters."""
    from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine

    engine = LabEngine(OPTIONS)
    plant(engine)
    with suppress(EngineDied):
        engine.admit("first", prompt(300), max_tokens=3)
        engine.run()
        engine.reset_prefix_cache()
        engine.admit("again", prompt(300), max_tokens=20)
        engine.step(12)
        engine.admit("other", prompt(200, seed=1), max_tokens=2)
        for _ in range(40):
            engine.step()
            if engine.requests["other"].is_finished():
                break
        if engine.requests["again"] in engine.scheduler.running:
            engine.preempt("again")
        engine.take_blocks(100)
        engine.step(2)
        engine.free_blocks()
        engine.run()
        engine.expect_all_ended()
    return [f"{found.code} {found.message}" for found in engine.findings], engine.counts


def misread() -> list[list[str]]:
    """Two schedules in which the lab itself was wrong once."""
    return [a_load_fails_behind_another(), a_reset_leaves_a_store()]


def a_load_fails_behind_another() -> list[str]:
    """The worker reports loads in their order: the second one, which has failed, after the first."""
    from kvfix_tools.lab.engine.lab_engine import LabEngine
    from kvfix_tools.lab.fuzz.fuzz_run import applied

    with applied(True, "check"):
        engine = LabEngine(replace(OPTIONS, delay=6))
        for seed in range(2):
            engine.admit(f"first {seed}", prompt(100, seed=seed), max_tokens=1)
            engine.run()
        engine.reset_prefix_cache()
        engine.admit("again 0", prompt(100), max_tokens=1)
        engine.step()
        engine.admit("again 1", prompt(100, seed=1), max_tokens=1)
        engine.fail_load("again 1")
        engine.step(2)
        assert set(engine.connector.loading()) == {"again 0", "again 1"}
        engine.run()
        engine.expect_all_ended()
        assert engine.counts["loads_failed"] == 1
    return [f"{found.code} {found.message}" for found in engine.findings]


def a_reset_leaves_a_store() -> list[str]:
    """A request has lost its blocks at the end of its store, and has computed fewer tokens than are stored."""
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.fuzz_run import applied
    from kvfix_tools.lab.fuzz.schedule import Schedule

    small = replace(OPTIONS, block_size=4, chunk_size=4, num_blocks=25, max_num_batched_tokens=8, delay=5)
    options = replace(
        small, max_num_seqs=2, drafter="mtp", drafts=4, acceptance=30, cpu_blocks=75, extra={"lazy_offload": False}
    )
    admit = [("admit", "a", 1, 28, 30), *[("step",)] * 3, ("admit", "b", 2, 13, 1), *[("step",)] * 3]
    with applied(True, "check"):
        done = play(Schedule(options, [*admit, ("new_weights",)]))
    assert done.counts["preemptions"] == 2
    return [f"{found.code} {found.message}" for found in done.findings]


def fuzzed(fixes: bool, seeds: int, plain: bool) -> dict[str, Any]:
    from kvfix_tools.lab.fuzz.fuzz_run import Run, fuzz

    done = fuzz(Run("simple-offload", fixes, plain, "check"), range(seeds), inf, shrinking=0)
    return {"found": sorted({each.message for each in done.violations}), "counts": done.counts}


def recorded() -> list[Any]:
    """Return kvfix's records of a request that loads: its Asked events, loads and stores."""
    kvfix.apply("observe", only=[])
    try:
        played()
        return [
            (type(each.event).__name__, *each.event[1:]) for each in session.events if each.event.request == "again"
        ]
    finally:
        kvfix.revert()


def on_a_full_disk(fixes: bool) -> list[Any]:
    """Two stores and the end are in the queue, and the disk is full at the first. Return the notes on each."""
    if fixes:
        kvfix.apply(only=["KVF370"])
    import torch
    from vllm.v1.simple_kv_offload import disk_backend
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    from kvfix_tools.roundtrip import cuda_stand_in

    vars(disk_backend)["torch"] = cuda_stand_in.Torch()
    worker = SimpleCPUOffloadWorker(None, None, 0)
    with suppress(AssertionError):  # it has no configuration
        worker.register_kv_caches({"layer": torch.zeros(1)})
    from_scheduler: Any = SimpleCPUOffloadMetadata()
    from_scheduler._kvfix_knows_failed_copies = True
    worker.bind_connector_metadata(from_scheduler)
    backend = disk_backend.DiskBackend()
    left = [OSError(28, os.strerror(28))]

    def store(*_: Any) -> None:
        if left:
            raise left.pop()

    backend._do_store = store
    for number in range(2):
        backend.launch_copy([0], [0], True, number, worker._store_events)
    backend._store_queue.put(None)
    stream: Any = SimpleNamespace(wait_event=lambda event: None)
    with suppress(OSError):
        backend._store_loop(torch.device("cpu"), stream)
    noted = [number for number, _ in worker._store_events], sorted(getattr(worker._store_events, "failed", ()))
    kvfix.revert()
    return list(noted)


def play_all() -> dict[str, Any]:
    return {
        "sound": played(),
        "faults": {plant.__name__: played(plant)[0] for plant in FAULTS},
        "plain": fuzzed(False, 60, plain=True),
        "fixed": fuzzed(True, 60, plain=False),
        "recorded": recorded(),
        "misread": misread(),
        "disk": [on_a_full_disk(False), on_a_full_disk(True)],
    }


@pytest.fixture(scope="module")
def outcomes(once: Once) -> dict[str, Any]:
    return dict(once(play_all, RELEASES / "0.5.6"))


def test_nothing_planted_nothing_found(outcomes: dict[str, Any]) -> None:
    found, counts = outcomes["sound"]
    assert found == []
    assert min(counts[each] for each in ("loaded_tokens", "stored_tokens", "preemptions", "stores_offloaded")) > 0


@pytest.mark.parametrize(("plant", "rules"), FAULTS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_planted(plant: Callable[[Any], None], rules: tuple[str, ...], outcomes: dict[str, Any]) -> None:
    found = outcomes["faults"][plant.__name__]
    assert any(message.startswith(rules) for message in found), found


def test_the_lab_takes_nothing_right_for_wrong(outcomes: dict[str, Any]) -> None:
    assert outcomes["misread"] == [[], []]


def test_plain_schedules_are_clean_as_released(outcomes: dict[str, Any]) -> None:
    run = outcomes["plain"]
    assert run["found"] == []
    assert min(run["counts"][each] for each in ("loaded_tokens", "stored_tokens", "preemptions")) > 0


def test_schedules_with_faults_are_clean_with_the_fixes(outcomes: dict[str, Any]) -> None:
    run = outcomes["fixed"]
    assert run["found"] == []
    happened = ("loads_failed", "aborted_loading", "aborted_storing", "loads_of_groups", "ranks_apart", "inputs")
    assert [each for each in happened if not run["counts"][each]] == []


def test_the_reader_knows_loads_and_stores(outcomes: dict[str, Any]) -> None:
    events = [tuple(each) for each in outcomes["recorded"]]
    asked = next(each for each in events if each[0] == "Asked" and each[4])
    _, total, computed, hit, promised, asynchronous = asked[:6]
    assert (total, computed, hit, promised, asynchronous) == (300, 0, 288, 288, True)
    order = [each[:3] for each in events if each[0] in ("Granted", "LoadDue")]
    assert order[:2] == [("Granted", 288), ("LoadDue", 0, 288)]
    stored = [each[1:3] for each in events if each[0] == "Stored"]
    assert stored
    assert all(start < end for start, end in stored)


def test_a_full_disk_ends_no_thread(outcomes: dict[str, Any]) -> None:
    released, fixed = outcomes["disk"]
    assert released == [[], []]
    assert fixed == [[0, 1], [0]]
