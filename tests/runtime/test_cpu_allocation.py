"""Test KVF016 with LMCache's own `allocate`, an allocator with little or no memory, and a simulated clock."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix import clock
from tests.conftest import answers

CHUNKS = 128  # a load of 32,768 tokens has this many chunks
FIXED = ["KVF016"]


class Never(Exception): ...


@pytest.mark.parametrize("release", ["0.3.9", "0.4.2", "0.5.6"])
@pytest.mark.parametrize(
    ("fixes", "chunks", "room", "every", "more", "answer"),
    [
        (False, 1, 0, 0, {}, ["never"]),
        (FIXED, 1, 0, 0, {}, [[0, 10], [0, 10]]),
        (FIXED, 1, 2, 0, {}, [[1, 0], [1, 0]]),
        (FIXED, 1, 0, 0, {"busy_loop": False}, [[0, 0], [0, 0]]),
        (FIXED, 1, 0, 0, {"eviction": False}, [[0, 0], [0, 0]]),
        (FIXED, CHUNKS, 20, 0, {}, [[20, 10], [0, 10]]),
        (FIXED, CHUNKS, 0, 3, {}, [[3, 10], [3, 10]]),  # one chunk in 3 s, so the load would take six minutes
    ],
)
@answers(also="fixes release answer")
def test_a_load_waits_ten_seconds_in_all(chunks: int, room: int, every: int, more: dict[str, Any]) -> list[Any]:
    """Return [number of chunks that get memory, seconds of waiting] for each of two loads. First, `room` chunks get
    memory. Then one chunk gets memory every `every` seconds (0: never)."""
    import lmcache.v1.storage_backend.local_cpu_backend as module

    now, slept, taken = [1000.0], [0.0], [0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept[0] += seconds
        if slept[0] > 30:
            raise Never

    def take(*_: Any) -> int | None:
        if taken[0] >= room + (slept[0] // every if every else 0):
            return None
        taken[0] += 1
        return 7

    time.sleep, clock.now = sleep, lambda: now[0]
    backend = SimpleNamespace(
        layerwise=False, enable_blending=False, use_hot=False, memory_allocator=SimpleNamespace(allocate=take),
        stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda keys: None),
    )  # fmt: skip
    found = []
    for _ in range(2):
        before = slept[0]
        try:
            allocated = [module.LocalCPUBackend.allocate(backend, None, None, **more) for _ in range(chunks)]
        except Never:
            return ["never"]
        found.append([sum(map(bool, allocated)), round(slept[0] - before)])
        now[0] += 60
    return found
