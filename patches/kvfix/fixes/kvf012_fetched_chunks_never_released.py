"""Chunks fetched ahead for a request that then loads nothing are never let go: the cache fills up with them.

## Symptom
With asynchronous loading, memory of the cache that nothing frees; in time `No eviction candidates found in local cpu
backend. Local cpu memory is under pressure.`

## Cause
A lookup that hits has its chunks fetched and pinned. If vLLM turns out to have as much, nothing is promised and nothing
loaded; only a load, or the clean-up of an aborted lookup, releases what was fetched. And neither takes back the pins
(0.3.15 cache_engine.py:1295), and from 0.3.10.post1 on the clean-up takes pairs of key and chunk for chunks, and
releases none: `Error releasing memory object: 'tuple' object has no attribute 'ref_count_down'`.

## Fix
When the request's pins are taken back at the end of its step, what was fetched and not loaded is released too. A load
and a clean-up take back the pins, and the clean-up releases chunks.

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
from kvfix.correction import after, around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(engine: ModuleType) -> Callable[..., Any]:
    def lookup_unpin(engine: Any, answer: None, lookup_id: str) -> None:
        if engine.async_loading:
            events = sys.modules["lmcache.v1.event_manager"]
            if engine.event_manager.get_event_status(events.EventType.LOADING, lookup_id) == events.EventStatus.DONE:
                engine.cleanup_memory_objs(lookup_id)

    return after(lookup_unpin)


def correct_clean_up(engine: ModuleType) -> Callable[..., Any]:
    @around
    def cleanup_memory_objs(engine: Any, lookup_id: str) -> Any:
        chunks = _engine.fetched(engine, lookup_id)
        return _released(engine, lookup_id, chunks) if chunks else None

    return cleanup_memory_objs


def _released(engine: Any, lookup_id: str, chunks: list[Any]) -> Generator[None, Any, None]:
    engine.event_manager.pop_event(sys.modules["lmcache.v1.event_manager"].EventType.LOADING, lookup_id)
    for chunk in chunks:
        _engine.unpin(chunk)
        chunk.ref_count_down()
    return  # the hook has nothing left to do
    yield


def correct_load(engine: ModuleType) -> Callable[..., Any]:
    @around
    def retrieve(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Generator[None, Any, Any] | None:
        chunks = _engine.fetched(engine, more.get("req_id")) if engine.async_loading else []
        return _unpinned_after(chunks) if chunks else None

    return retrieve


def _unpinned_after(chunks: list[Any]) -> Generator[None, Any, Any]:
    answer = yield
    for chunk in chunks:
        _engine.unpin(chunk)
    return answer


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
    patches=tuple(
        Patch("lmcache", _engine.MODULE, f"LMCacheEngine.{function}", ">=0.3.10,<0.4.1", shows, correction)
        for function, shows, correction in (
            ("lookup_unpin", shows_bug, correct),
            ("cleanup_memory_objs", probe.cannot_tell, correct_clean_up),
            ("retrieve", probe.cannot_tell, correct_load),
        )
    ),
)
