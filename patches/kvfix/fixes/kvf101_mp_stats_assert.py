"""A client that asks for cache statistics and goes away before its lookup kills EngineCore.

## Symptom
EngineCore dies with `AssertionError: Request tracker for request_id cmpl-... not found. ` in `request_finished`. Any
client can do it: send `kv_transfer_params` with `cached_token_stats` (`num_lmcache_extra_cached_tokens` in vLLM's copy
and in LMCache 0.4.5), and close the connection while the request waits.

## Cause
`request_finished` takes the numbers from the request's tracker (lmcache_mp_connector.py 0.5.6:1552). The tracker is
made by the first `get_num_new_matched_tokens`; a request that is aborted before it has none, and
`_get_request_tracker` asserts.

## Fix
Before `request_finished`: a request that asks for statistics and has no tracker gets a fresh one, whose numbers are
zero. The hook itself throws it away, as it does with every tracker.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.5 to 0.5.5 with lmcache_mp_connector_0201. vLLM 0.26.0 to 0.32.0, its own copy of the
connector.

## Upstream
https://github.com/vllm-project/vllm/pull/56780 (open).

## Remove when
`request_finished` no longer asserts that there is a tracker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import before
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: What a client may ask for, by release.
STATISTICS = ("cached_token_stats", "num_lmcache_extra_cached_tokens")


def correct(module: ModuleType) -> Callable[..., Any]:
    make_tracker = module.LMCacheMPRequestTracker

    def request_finished(connector: Any, request: Any, block_ids: Any) -> None:
        asked = request.kv_transfer_params
        if asked and any(name in asked for name in STATISTICS):
            connector.request_trackers[request.request_id] = make_tracker(request)

    return before(request_finished, when="request.request_id not in connector.request_trackers")


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A request that nobody has looked up asks for its statistics."""
    request = _mp.request(kv_transfer_params=dict.fromkeys(STATISTICS, True))
    try:
        hook(_mp.scheduler_side(module), request, [])
    except AssertionError:
        return True
    return False


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches(
        "request_finished", shows_bug, correct, lmcache=">=0.4.5,<=0.5.6", vllm=">=0.26.0", for_0180=""
    ),
)
