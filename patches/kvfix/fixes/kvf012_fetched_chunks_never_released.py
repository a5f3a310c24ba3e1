"""Chunks fetched ahead for a request that then loads nothing are never let go: the cache fills up with them.

## Symptom
With asynchronous loading, memory of the cache that nothing frees; in time `No eviction candidates found in local cpu
backend. Local cpu memory is under pressure.`

## Cause
A lookup that hits has its chunks fetched. If vLLM turns out to have as much, nothing is promised and nothing loaded;
only a load, or the clean-up of an aborted lookup, releases what was fetched.

## Fix
When the request's pins are taken back at the end of its step, what was fetched and not loaded is released too.

## Releases
LMCache 0.3.10 to 0.3.15, with `enable_async_loading`.

## Upstream
https://github.com/LMCache/LMCache/pull/2559; fixed in 0.4.1.

## Remove when
LMCache 0.3.15 is no longer in use.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(engine: ModuleType) -> Callable[..., Any]:
    def lookup_unpin(engine: Any, answer: None, lookup_id: str) -> None:
        if engine.async_loading:
            events = sys.modules["lmcache.v1.event_manager"]
            if engine.event_manager.get_event_status(events.EventType.LOADING, lookup_id) == events.EventStatus.DONE:
                engine.cleanup_memory_objs(lookup_id)

    return after(lookup_unpin)


def shows_bug(hook: Callable[..., Any], engine: ModuleType) -> bool:
    """Fetched, and not loaded. Wrong is not to clean up."""
    cleaned: list[str] = []
    done = sys.modules["lmcache.v1.event_manager"].EventStatus.DONE
    stub = SimpleNamespace(
        lookup_pins={},
        async_loading=True,
        storage_manager=None,
        event_manager=SimpleNamespace(get_event_status=lambda kind, name: done),
        cleanup_memory_objs=cleaned.append,
    )
    hook(stub, probe.NAME)
    return not cleaned


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.v1.cache_engine",
            function="LMCacheEngine.lookup_unpin",
            broken=">=0.3.10,<0.4.1",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
