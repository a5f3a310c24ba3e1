"""What the fixes of LMCache's cache engine share: the memory objects of its chunks, and who holds them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvfix.correction import View

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "lmcache.v1.cache_engine"


def fetched(engine: Any, lookup_id: Any) -> list[Any]:
    """Memory objects that an asynchronous lookup has fetched. None where the fetch is not done or has failed."""
    future = _done(engine, lookup_id)
    if future is None or future.exception() is not None:
        return []
    return [_chunk(each) for of_backend in future.result() for each in of_backend]


def keep_fetched(engine: Any, lookup_id: Any, wanted: Callable[[Any], bool]) -> None:
    """Of what it has fetched, only these memory objects are the lookup's from now on."""
    future = _done(engine, lookup_id)
    if future is not None:
        kept = [[each for each in of_backend if wanted(_chunk(each))] for of_backend in future.result()]
        _done_events(engine)[lookup_id] = View(future, result=lambda *_: kept)


def _done(engine: Any, lookup_id: Any) -> Any:
    return _done_events(engine).get(lookup_id)


def _done_events(engine: Any) -> Any:
    """LMCache's own, by lookup id (0.5.6 event_manager.py:61)."""
    events = sys.modules["lmcache.v1.event_manager"]
    return engine.event_manager.events[events.EventType.LOADING][events.EventStatus.DONE]


def _chunk(fetched: Any) -> Any:
    return fetched[1] if isinstance(fetched, tuple) else fetched  # 0.3.10 has no key beside it


def unpin(chunk: Any) -> None:
    """Take one pin back, if it has any."""
    if chunk.is_pinned:
        chunk.unpin()
