"""A request aborted between its lookup and its admission keeps the read locks of the server until they time out.

## Symptom
Nothing in the log of vLLM. Chunks that were looked up stay read-locked in the LMCache server for the read TTL
(`read_ttl_seconds`, 300 s by default): under pressure the server finds nothing to evict, and stores fail. Up to LMCache
0.5.4, and in vLLM's copy, the scheduler also keeps the lookup of every such request for ever, and a later request with
the same id is answered with its hit.

## Cause
A lookup locks what it finds until the chunks are retrieved or given back with `free_lookup_locks`. `request_finished`
ends the session (lmcache_mp_connector.py 0.5.6:1579), which releases no lock (modules/lookup.py 0.5.6:462).

## Fix
Before `request_finished`: a request that was looked up and never admitted gives its locks back, while the session is
there to say which they are, and its lookup is forgotten. Where the answer to the lookup has not been read yet, LMCache
0.5.6 is told to release what it holds of the request; older ones, whose locks are counters without owner, are asked
for the answer first. A prefetch that is still running keeps its locks until the TTL, as before.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
https://github.com/vllm-project/vllm/pull/44100 (open), https://github.com/LMCache/LMCache/issues/5248.

## Remove when
`request_finished` frees the locks of a lookup that was not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import before
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def request_finished(connector: Any, request: Any, *_: Any, **__: Any) -> None:
        tracker = connector.request_trackers.get(request.request_id)
        if tracker is None or tracker.state.name != "PREFETCHING":
            return  # admitted: its locks went with that, or go with the load
        adapter = connector.scheduler_adapter
        tokens = _mp.token_ids(tracker)
        locked = _mp.tokens(tracker, "num_lmcache_hit", _mp.block_size(connector))
        if not locked and request.request_id in adapter._pending_lookups:
            locked = _unread(adapter, request.request_id, len(tokens))
        if locked:
            known = ("cache_salt", "request_configs")  # what the lookup was sent with
            more = {name: getattr(tracker, name) for name in known if hasattr(tracker, name)}
            adapter.free_lookup_locks(token_ids=tokens, start=0, end=locked, request_id=request.request_id, **more)
        adapter.cleanup_lookup_result(request.request_id)

    return before(request_finished)


def _unread(adapter: Any, request_id: str, tokens: int) -> int:
    """What a lookup may have locked whose answer nobody has read.

    The server of 0.5.6 (its client keeps `_lookup_status`) releases only what the request has locked. To older ones
    the range is an order: a chunk too many takes the lock of another reader.
    """
    if hasattr(adapter, "_lookup_status") and request_id not in adapter._finished_lookup_results:
        chunk = int(adapter.lmcache_tokens_per_chunk)
        return tokens // chunk * chunk
    return int(adapter.check_lookup_result(request_id) or 0)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """512 tokens were found for a request that goes away before it is admitted."""
    connector, request = _mp.scheduler_side(module), _mp.request()
    tracker = connector.request_trackers[request.request_id] = module.LMCacheMPRequestTracker(request)
    _mp.set_tokens(tracker, "num_lmcache_hit", 512)
    hook(connector, request, [])
    return "free_lookup_locks" not in connector.scheduler_adapter.names()


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches("request_finished", shows_bug, correct, lmcache=">=0.4.5,<=0.5.6", vllm=">=0.26.0"),
)
