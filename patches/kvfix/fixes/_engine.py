"""Shared by the fixes of LMCache's cache engine: the memory objects of the chunks that a lookup has fetched."""

import sys
from collections.abc import Callable
from typing import Any

from kvfix.fixes.api import View


def fetched(engine: Any, lookup_id: Any) -> list[Any]:
    """Memory objects that an asynchronous lookup has fetched. Empty if the fetch is not done or has failed."""
    future = _done(engine, lookup_id)
    if future is None or future.exception() is not None:
        return []
    return [_chunk(each) for of_backend in future.result() for each in of_backend]


def keep_fetched(engine: Any, lookup_id: Any, wanted: Callable[[Any], bool]) -> None:
    """Remove from the lookup the fetched memory objects that are not wanted."""
    future = _done(engine, lookup_id)
    if future is not None:
        kept = [[each for each in of_backend if wanted(_chunk(each))] for of_backend in future.result()]
        _done_events(engine)[lookup_id] = View(future, result=lambda *_: kept)


def _done(engine: Any, lookup_id: Any) -> Any:
    return _done_events(engine).get(lookup_id)


def _done_events(engine: Any) -> Any:
    """LMCache's own dict of finished fetches, by lookup id (0.5.6 event_manager.py:61)."""
    events = sys.modules["lmcache.v1.event_manager"]
    return engine.event_manager.events[events.EventType.LOADING][events.EventStatus.DONE]


def _chunk(fetched: Any) -> Any:
    return fetched[1] if isinstance(fetched, tuple) else fetched  # later than 0.3.10: a pair of key and chunk


def unpin(chunk: Any) -> None:
    """Release one pin of the chunk, if it has any."""
    if chunk.is_pinned:
        chunk.unpin()
