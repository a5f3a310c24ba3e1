"""KVF016 on LMCache's own `allocate`, with an allocator without memory and a simulated clock."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix import clock
from tests.conftest import ForkServer, release

#: Chunks of a load of 32,768 tokens.
CHUNKS = 128


class Never(Exception): ...


def backend_with(take: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        layerwise=False, enable_blending=False, use_hot=False, memory_allocator=SimpleNamespace(allocate=take),
        stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda keys: None),
    )  # fmt: skip


def allocate(memory: int | None, more: dict[str, Any]) -> list[Any]:
    """The answer of `allocate`, and the seconds that it has slept."""
    import lmcache.v1.storage_backend.local_cpu_backend as module

    module.logger.disabled = True
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 300:
            raise Never

    time.sleep, clock.now = sleep, lambda: sum(slept)
    backend = backend_with(lambda *_: memory)
    try:
        answer = module.LocalCPUBackend.allocate(backend, None, None, **more)
    except Never:
        answer = "never"
    return [answer, round(sum(slept))]


@pytest.mark.parametrize("name", ["0.3.9", "0.4.2", "0.5.6"])
@pytest.mark.parametrize(
    ("fixes", "memory", "more", "answer"),
    [
        (False, None, {}, ["never", 30]),
        (True, None, {}, [None, 10]),
        (True, 7, {}, [7, 0]),
        (True, None, {"busy_loop": False}, [None, 0]),
        (True, None, {"eviction": False}, [None, 0]),
    ],
)
def test_allocate(name, fixes, memory, more, answer, fork_server: ForkServer) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(allocate, release(name), memory, more, fixes=fixes) == answer


def loads(every: float) -> list[list[Any]]:
    """Return the chunks that get memory and the seconds of waiting, for each of two loads with a minute between them.

    every: seconds after which the allocator has memory for another chunk; 0: it has memory for 20 chunks at once.
    """
    import lmcache.v1.storage_backend.local_cpu_backend as module

    module.logger.disabled = True
    now, taken = [1000.0], [0]
    time.sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)
    clock.now = lambda: now[0]

    def take(*_: Any) -> int | None:
        if taken[0] >= ((now[0] - 1000) // every if every else 20):
            return None
        taken[0] += 1
        return 7

    backend = backend_with(take)
    found = []
    for _ in range(2):
        began = now[0]
        chunks = [module.LocalCPUBackend.allocate(backend, None, None) for _ in range(CHUNKS)]
        found.append([sum(map(bool, chunks)), round(now[0] - began)])
        now[0] += 60
        taken[0] = int((now[0] - 1000) // every) if every else 20
    return found


@pytest.mark.parametrize(
    ("every", "found"),
    [
        (0, [[20, 10], [0, 10]]),
        (3, [[3, 10], [3, 10]]),  # memory comes, and slowly: the load would take six minutes
    ],
)
def test_a_load_of_many_chunks_waits_ten_seconds_in_all(every, found, fork_server: ForkServer) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(loads, release("0.5.6"), every, fixes=["KVF016"]) == found
