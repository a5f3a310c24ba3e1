"""A request whose load failed is promised the same tokens again, nobody loads them, and it waits for ever.

## Symptom
With `kv_load_failure_policy=recompute`: after `Recovered from KV load failure: 1 request(s) rescheduled` the request
stays in WAITING_FOR_REMOTE_KVS and keeps its blocks. `Running: 0 reqs, Waiting: 1 reqs`, no throughput, no error.

## Cause
vLLM sets the request back to nothing computed and asks again. The tracker is READY and keeps the hit: the hook promises
it once more (lmcache_mp_connector.py 0.5.4:777), but `update_state_after_alloc` starts a load only for a tracker that
is PREFETCHING (0.5.4:852).

## Fix
Before `get_num_new_matched_tokens`: a request that was admitted with a hit and has nothing computed starts anew, with
the answer that nothing is cached. It is computed here, as LMCache does from 0.5.5 on: a second load would fail for the
same reason, and a third.

## Releases
LMCache 0.4.5 to 0.5.4. vLLM 0.32.0, its own copy of the connector.

## Upstream
None known. LMCache 0.5.5 has its own remedy ("Bypassing LMCache for request").

## Remove when
LMCache 0.5.4 is no longer in use, and vLLM's copy bypasses too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.fix import Fix, before
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    make_tracker = module.LMCacheMPRequestTracker

    def get_num_new_matched_tokens(connector: Any, request: Any, *_: Any, **__: Any) -> None:
        tracker = connector.request_trackers.get(request.request_id)
        if (
            tracker is None
            or tracker.state.name != "READY"
            or request.num_computed_tokens
            or getattr(request.status, "name", "") == "PREEMPTED"  # it has its own way to start anew
            or not _mp.tokens(tracker, "num_lmcache_hit")
        ):
            return
        adapter = connector.scheduler_adapter
        connector.request_trackers[request.request_id] = make_tracker(request)
        adapter._finished_lookup_results[request.request_id] = 0
        adapter._pending_lookups.add(request.request_id)  # so the client does not look up again

    return before(get_num_new_matched_tokens)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A tracker that is READY with a hit of 512, and a request with nothing computed."""
    connector, request = _mp.scheduler_side(module, found=512), _mp.request()
    hook(connector, request, 0)
    connector.request_trackers[request.request_id].state = module.LMCacheMPRequestState.READY
    return bool(hook(connector, request, 0)[0])


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches("get_num_new_matched_tokens", shows_bug, correct, lmcache=">=0.4.5,<=0.5.4", vllm="==0.32.0"),
)
