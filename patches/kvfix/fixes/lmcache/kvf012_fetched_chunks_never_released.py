"""The CPU cache fills up: LMCache never releases chunks that were fetched for a request that then loads nothing.

Symptom: With `enable_async_loading`, memory of the CPU cache is never freed. Later LMCache logs `No eviction candidates
found in local cpu backend. Local cpu memory is under pressure.`

Cause: A lookup with a hit fetches and pins the chunks. If vLLM's own prefix cache has at least as many tokens as the
hit, LMCache loads nothing. Only a load or the clean-up of an aborted lookup releases the chunks. Neither the load nor
the clean-up removes the pins (0.3.15 cache_engine.py:1291). From 0.3.10.post1 on, the clean-up treats a (key, chunk)
pair as a chunk, and fails (`Error releasing memory object: 'tuple' object has no attribute 'ref_count_down'`).

Fix: At the end of a step LMCache calls `lookup_unpin` for each request of the step. With the fix, `lookup_unpin` and
the clean-up unpin and release all chunks that were not loaded. A load also unpins the fetched chunks.
- Upstream: https://github.com/LMCache/LMCache/pull/2559; fixed in 0.4.1.
"""

import sys

from kvfix.fixes import _lmcache
from kvfix.fixes.api import CACHE_ENGINE, Any, Fix, Steps, fix_after, fix_around, instead, note, stubs


@fix_after()
def fix(engine: Any, answer: None, lookup_id: str) -> None:
    if engine.async_loading:
        events = sys.modules["lmcache.v1.event_manager"]
        if engine.event_manager.get_event_status(events.EventType.LOADING, lookup_id) == events.EventStatus.DONE:
            note(__name__, f"request {lookup_id}: its fetched chunks are released")
            engine.cleanup_memory_objs(lookup_id)


@fix_around()
def fix_clean_up(engine: Any, lookup_id: str) -> Any:
    chunks = _lmcache.fetched(engine, lookup_id)
    if not chunks:
        return None
    engine.event_manager.pop_event(sys.modules["lmcache.v1.event_manager"].EventType.LOADING, lookup_id)
    for chunk in chunks:
        _lmcache.unpin(chunk)
        chunk.ref_count_down()
    return instead(None)


@fix_around()
def fix_load(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Steps:
    chunks = _lmcache.fetched(engine, more.get("req_id")) if engine.async_loading else []
    yield
    for chunk in chunks:
        _lmcache.unpin(chunk)


def shows_bug(hook: Any, engine: Any) -> bool:
    """Unpin a request whose chunks were fetched and not loaded. With the bug, the chunks are not cleaned up."""
    cleaned: list[str] = []
    done = sys.modules["lmcache.v1.event_manager"].EventStatus.DONE
    stub = stubs.Stub(
        lookup_pins={}, async_loading=True, storage_manager=None, cleanup_memory_objs=cleaned.append,
        event_manager=stubs.Stub(get_event_status=lambda kind, name: done),
    )  # fmt: skip
    hook(stub, stubs.NAME)
    return not cleaned


BROKEN = ">=0.3.10,<0.4.1"
FIX = Fix(
    CACHE_ENGINE.lookup_unpin(broken=BROKEN, probe=shows_bug, fix=fix),
    CACHE_ENGINE.cleanup_memory_objs(broken=BROKEN, fix=fix_clean_up),
    CACHE_ENGINE.retrieve(broken=BROKEN, fix=fix_load, order=1),
    effect="leak",
    evidence={"KVD402": "", "KVR009": "^fetched chunks of the worker "},
    scenarios=("async-fetched-left",),
)
