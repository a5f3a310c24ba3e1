"""A request whose load failed is promised the same tokens again, nobody loads them, and it waits for ever.

## Symptom
With `kv_load_failure_policy=recompute`: after `Recovered from KV load failure: 1 request(s) rescheduled` the request
stays in WAITING_FOR_REMOTE_KVS and keeps its blocks. `Running: 0 reqs, Waiting: 1 reqs`, no throughput, no error.
LMCache 0.5.6: `<resume-load> req=...` for the same request in every other step, and it never runs.

## Cause
vLLM sets the request back to nothing computed and asks again. The tracker is READY and keeps the hit: the hook promises
it once more (lmcache_mp_connector.py 0.5.4:777), but `update_state_after_alloc` starts a load only for a tracker that
is PREFETCHING (0.5.4:852). LMCache 0.5.5 answers 0 instead; but 0.5.6 also loads for preempted requests, and those get
a fresh tracker before that is looked at (0.5.6:1833): while the load fails they are looked up and loaded in a circle.

## Fix
Before `get_num_new_matched_tokens`: a request that was admitted with a hit, has never run since and has nothing
computed starts anew, with the answer that nothing is cached. It is computed here, as in LMCache 0.5.5. Where LMCache
has its own remedy, only a preempted request does, which that does not reach.

## Releases
LMCache 0.4.5 to 0.5.4, and 0.5.6 for preempted requests; 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM
0.26.0 to 0.32.0, its own copy of the connector.

## Upstream
None known. LMCache 0.5.5 has its own remedy ("Bypassing LMCache for request").

## Remove when
LMCache 0.5.4 is no longer in use, LMCache bypasses preempted requests too, and so does vLLM's copy.
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
    make_tracker, ready = module.LMCacheMPRequestTracker, module.LMCacheMPRequestState.READY
    preempted = module.RequestStatus.PREEMPTED
    bypasses = hasattr(module.LMCacheMPRequestState, "BYPASS_LMCACHE")

    def get_num_new_matched_tokens(connector: Any, request: Any, num_computed_tokens: int) -> None:
        tracker = connector.request_trackers[request.request_id]
        if (
            request.num_computed_tokens
            or tracker.num_scheduled_tokens  # it ran: this is a preemption, not a load that failed
            or not _mp.tokens(tracker, "num_lmcache_hit")
            or (bypasses and request.status != preempted)
        ):
            return
        connector.request_trackers[request.request_id] = make_tracker(request)
        _mp.nothing_cached(connector.scheduler_adapter, request.request_id)

    # It is asked in every step in which the request waits, and is not READY then.
    return before(get_num_new_matched_tokens, when=_mp.in_state("ready"), ready=ready)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A tracker that is READY with a hit of 512, and a request with nothing computed; then the same, preempted."""
    for status in (None, module.RequestStatus.PREEMPTED):
        connector, request = _mp.scheduler_side(module, found=512), _mp.request()
        hook(connector, request, 0)
        connector.request_trackers[request.request_id].state = module.LMCacheMPRequestState.READY
        request.status = status
        if hook(connector, request, 0)[0]:
            return True
    return False


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches(
        "get_num_new_matched_tokens", shows_bug, correct, lmcache=">=0.4.5,<=0.5.6,!=0.5.5", vllm=">=0.26.0"
    ),
)
