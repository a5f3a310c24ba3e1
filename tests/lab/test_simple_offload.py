"""vLLM's SimpleCPUOffloadConnector: what the lab took for wrong once, what kvfix records, and its threads (KVF370)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix.session import session
from kvfix_tools.lab.fuzz.schedule import Schedule
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once
from tests.lab.planted import SETUPS, schedule_offloading

NEWEST = RELEASES / "0.5.6"
OPTIONS = SETUPS["simple-offload"].options


def a_load_fails_behind_another() -> list[str]:
    """The worker reports loads in their order: the second one, which has failed, after the first."""
    from kvfix_tools.lab.fuzz.fuzz_run import applied

    with applied(True, "check"):
        engine = late.LabEngine(replace(OPTIONS, delay=6))
        for seed in range(2):
            engine.serve(f"first {seed}", prompt(100, seed=seed), max_tokens=1)
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
    from kvfix_tools.lab.fuzz.fuzz_run import applied

    small = replace(OPTIONS, block_size=4, chunk_size=4, num_blocks=25, max_num_batched_tokens=8, delay=5)
    options = replace(
        small, max_num_seqs=2, drafter="mtp", drafts=4, acceptance=30, cpu_blocks=75, extra={"lazy_offload": False}
    )
    admit = [("admit", "a", 1, 28, 30), *[("step",)] * 3, ("admit", "b", 2, 13, 1), *[("step",)] * 3]
    with applied(True, "check"):
        done = late.play(Schedule(options, [*admit, ("new_weights",)]))
    assert done.counts["preemptions"] == 2
    return [f"{found.code} {found.message}" for found in done.findings]


def recorded() -> list[Any]:
    """Return kvfix's records of a request that loads: its Asked events, loads and stores."""
    kvfix.apply("observe", only=[])
    schedule_offloading(late.LabEngine(OPTIONS))
    return [(type(each.event).__name__, *each.event[1:]) for each in session.events if each.event.request == "again"]


def on_a_full_disk() -> list[Any]:
    """Two stores and the end are in the queue, and the disk is full at the first. Return the notes on each."""
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
    return [[number for number, _ in worker._store_events], sorted(getattr(worker._store_events, "failed", ()))]


@pytest.mark.parametrize("schedule", [a_load_fails_behind_another, a_reset_leaves_a_store])
def test_the_lab_takes_nothing_right_for_wrong(schedule: Any, once: Once) -> None:
    """It did so once in each of these schedules."""
    assert once(schedule, NEWEST) == []


def test_the_reader_knows_loads_and_stores(once: Once) -> None:
    events = [tuple(each) for each in once(recorded, NEWEST)]
    asked = next(each for each in events if each[0] == "Asked" and each[4])
    _, total, computed, hit, promised, asynchronous = asked[:6]
    assert (total, computed, hit, promised, asynchronous) == (300, 0, 288, 288, True)
    order = [each[:3] for each in events if each[0] in ("Granted", "LoadDue")]
    assert order[:2] == [("Granted", 288), ("LoadDue", 0, 288)]
    stored = [each[1:3] for each in events if each[0] == "Stored"]
    assert stored
    assert all(start < end for start, end in stored)


def test_a_full_disk_ends_no_thread(once: Once) -> None:
    assert once.both(on_a_full_disk, NEWEST, fixes=["KVF370"]) == [[[], []], [[0, 1], [0]]]
