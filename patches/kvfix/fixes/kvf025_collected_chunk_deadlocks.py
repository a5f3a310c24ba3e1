"""The garbage collector frees a chunk under a lock that its thread holds: the thread stands still for ever.

## Symptom
The engine or the server hangs, at any time; `py-spy dump` shows `__del__ (lmcache/v1/memory_management.py)` and below
it `free` or `wrapper (lmcache/utils.py)`, which wait for a lock, on top of a function that holds it.

## Cause
`TensorMemoryObj.__del__` frees what was never released. That takes the lock of `AddressManager`, and the one that all
statistics share (0.5.6 utils.py:714-731); both are plain locks. A chunk in a reference cycle, as an exception makes it,
is collected while any code allocates, and so while `allocate` or `PrometheusLogger.GetOrCreate` holds one of them.

## Fix
`__del__` keeps the chunk. The next chunk whose reference is given up frees it first, where both locks may be taken.

## Releases
LMCache 0.3.14 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/pull/4675 is open, for the lock of the statistics;
https://github.com/LMCache/LMCache/issues/3533 was closed as stale, about the one of the allocator.

## Remove when
`__del__` takes no lock, or they are ones that a thread may take twice.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around, before, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

#: Chunks that the collector has found. Appending and taking are atomic.
COLLECTED: deque[Any] = deque()
#: Of a chunk that is to be freed now.
FREE = "_kvfix_free"


def correct(module: ModuleType) -> Callable[..., Any]:
    @around
    def __del__(chunk: Any) -> Generator[None, Any, Any] | None:
        if chunk.parent_allocator is None or not chunk.is_valid() or FREE in vars(chunk):
            return None
        COLLECTED.append(chunk)
        return instead(None)

    return __del__


def correct_release(module: ModuleType) -> Callable[..., Any]:
    def ref_count_down(chunk: Any) -> None:
        while COLLECTED:
            try:
                gone = COLLECTED.popleft()
            except IndexError:  # another thread took it
                return
            vars(gone)[FREE] = True
            gone.__del__()

    return before(ref_count_down, when="COLLECTED", COLLECTED=COLLECTED)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A chunk that is referred to and collected. Wrong is to free it there and then."""
    freed: list[Any] = []
    chunk = SimpleNamespace(
        parent_allocator=SimpleNamespace(free=freed.append),
        is_valid=lambda: True,
        meta=SimpleNamespace(ref_count=0, pin_count=0, address=0),
    )
    hook(chunk)
    return bool(freed)


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            "lmcache",
            "lmcache.v1.memory_management",
            "TensorMemoryObj.__del__",
            ">=0.3.14",
            shows_bug,
            correct,
        ),
        Patch(
            "lmcache",
            "lmcache.v1.memory_management",
            "TensorMemoryObj.ref_count_down",
            ">=0.3.14",
            probe.cannot_tell,
            correct_release,
            helper=True,
        ),
    ),
)
