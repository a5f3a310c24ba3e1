"""What the fixes of LMCache's cache engine share: the memory objects of its chunks, and who holds them."""

from __future__ import annotations

import sys
from typing import Any

MODULE = "lmcache.v1.cache_engine"


def fetched(engine: Any, lookup_id: Any) -> list[Any]:
    """Memory objects that an asynchronous lookup has fetched. None where the fetch is not done or has failed."""
    events = sys.modules["lmcache.v1.event_manager"]
    kind = events.EventType.LOADING
    if engine.event_manager.get_event_status(kind, lookup_id) != events.EventStatus.DONE:
        return []
    if hasattr(engine.event_manager, "get_event_future"):
        future = engine.event_manager.get_event_future(kind, lookup_id)
    else:  # to 0.3.15
        future = engine.event_manager.events[kind][events.EventStatus.DONE][lookup_id]
    if future.exception() is not None:
        return []
    chunks = [chunk for of_backend in future.result() for chunk in of_backend]
    return [chunk[1] if isinstance(chunk, tuple) else chunk for chunk in chunks]  # 0.3.10 has no key beside it


def unpin(chunk: Any) -> None:
    """Take one pin back, if it has any."""
    if chunk.is_pinned:
        chunk.unpin()
