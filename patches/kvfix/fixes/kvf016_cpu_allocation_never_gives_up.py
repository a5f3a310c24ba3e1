"""A load waits for memory of the CPU cache that nobody will free, for ever, and the worker with it.

## Symptom
`No eviction candidates found in local cpu backend. Local cpu memory is under pressure. Waiting for 0.1 seconds before
retrying.`, every 0.1 seconds, for ever. `Running: N reqs`, and no throughput.

## Cause
`allocate` evicts only what the CPU cache itself holds. With `local_cpu: false`, where the CPU is but the stage for disk
or remote, or with every chunk pinned, there is nothing to evict, and a load waits without end (0.5.6
local_cpu_backend.py:686-745).

## Fix
It waits ten seconds at most and then has no memory, which is a load that fails: vLLM computes those tokens itself. A
store does not wait, as before. Where a chunk is loaded from disk, no memory is no chunk instead of an AssertionError.

## Releases
LMCache 0.3.9 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/2942 is open, https://github.com/LMCache/LMCache/issues/3804. Until then:
`local_cpu: true`, a larger `max_local_cpu_size`, fewer requests at once.

## Remove when
`allocate` gives up.
"""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import clock, notice, probe
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

LONGEST_WAIT, BETWEEN = 10.0, 0.1
#: Places of `eviction` and `busy_loop` among the arguments, without self, in every release.
PLACES = {"allocate": (3, 4), "batched_allocate": (4, 5)}


def correct(module: ModuleType) -> Callable[..., Any]:
    def bounded(original: Callable[..., Any]) -> Callable[..., Any]:
        evicts, loops = PLACES.get(original.__name__, (99, 99))

        @functools.wraps(original)
        def hook(backend: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) != loops + 1 or not (args[evicts] and args[loops]):
                return original(backend, *args, **kwargs)
            until = clock.now() + LONGEST_WAIT
            while True:
                memory = original(backend, *args[:loops], False)
                if memory is not None:
                    return memory
                if clock.now() >= until:
                    notice.warn(
                        f"KVF016: LMCache's CPU cache has had no memory for a load for {LONGEST_WAIT:.0f} s; the load "
                        "is given up, its tokens are computed. Look at local_cpu and max_local_cpu_size."
                    )
                    return None
                time.sleep(BETWEEN)

        return hook

    return bounded


def correct_disk(module: ModuleType) -> Callable[..., Any]:
    def without_memory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_bytes_from_disk(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except AssertionError as error:
                if "Memory allocation failed" not in str(error):
                    raise
                return None

        return load_bytes_from_disk

    return without_memory


def disk_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A chunk is to be loaded, and there is no memory. Right is None, wrong is an AssertionError."""
    backend = SimpleNamespace(local_cpu_backend=SimpleNamespace(allocate=lambda *_, **__: None))
    try:
        return hook(backend, None, "", dtype=None, shape=None, fmt=None) is not None
    except AssertionError:
        return True


CPU = "lmcache.v1.storage_backend.local_cpu_backend"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch("lmcache", CPU, "LocalCPUBackend.allocate", ">=0.3.9", probe.cannot_tell, correct),
        Patch("lmcache", CPU, "LocalCPUBackend.batched_allocate", ">=0.3.9", probe.cannot_tell, correct),
        Patch(
            "lmcache",
            "lmcache.v1.storage_backend.local_disk_backend",
            "LocalDiskBackend.load_bytes_from_disk",
            ">=0.3.9",
            disk_shows_bug,
            correct_disk,
        ),
    ),
)
