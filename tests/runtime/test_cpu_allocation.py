"""KVF016 on LMCache's own `allocate`, with an allocator without memory and a simulated clock."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

import kvfix
from kvfix import clock
from tests.conftest import ForkServer


class Never(Exception): ...


def allocate(only: list[str] | None, memory: int | None, more: dict[str, Any]) -> list[Any]:
    """The answer of `allocate`, and the seconds that it has slept."""
    kvfix.apply(only=only)
    import lmcache.v1.storage_backend.local_cpu_backend as module

    module.logger.disabled = True
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 300:
            raise Never

    time.sleep, clock.now = sleep, lambda: sum(slept)
    backend = SimpleNamespace(
        layerwise=False,
        enable_blending=False,
        use_hot=False,
        memory_allocator=SimpleNamespace(allocate=lambda *_: memory),
        stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda keys: None),
    )
    try:
        answer = module.LocalCPUBackend.allocate(backend, None, None, **more)
    except Never:
        answer = "never"
    return [answer, round(sum(slept))]


@pytest.mark.parametrize("name", ["0.3.9", "0.4.2", "0.5.6"])
@pytest.mark.parametrize(
    ("only", "memory", "more", "answer"),
    [
        ([], None, {}, ["never", 30]),  # as released
        (None, None, {}, [None, 10]),
        (None, 7, {}, [7, 0]),
        (None, None, {"busy_loop": False}, [None, 0]),
        (None, None, {"eviction": False}, [None, 0]),
    ],
)
def test_allocate(name, only, memory, more, answer, fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(allocate, release(name), only, memory, more) == answer
