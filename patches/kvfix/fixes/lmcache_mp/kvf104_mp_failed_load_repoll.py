"""A request waits for ever after a failed load: LMCache promises the same tokens again, and nothing loads them.

Symptom: With `kv_load_failure_policy=recompute` the log has `Recovered from KV load failure: 1 request(s) rescheduled`.
Then the request stays in WAITING_FOR_REMOTE_KVS and keeps its blocks. vLLM logs `Running: 0 reqs, Waiting: 1 reqs`, no
throughput and no error. LMCache 0.5.6 logs `<resume-load> req=...` for the request in every second step.

Cause: vLLM resets the request to zero computed tokens and calls `get_num_new_matched_tokens` again. The function looks
up the prompt again and promises the hit again (lmcache_mp_connector.py 0.5.4:809). But LMCache's tracker of the request
is READY, and `update_state_after_alloc` starts a load only in the state PREFETCHING (0.5.4:869).

LMCache 0.5.5 recognizes a request whose load has failed, and promises 0 tokens. LMCache 0.5.6 gives a preempted
request a new tracker (0.5.6:1833). The new tracker records no failed load, so LMCache repeats lookup and load for ever.

Fix: A load has failed if its request was admitted with a hit, has not run since then, and has no computed tokens. The
fix gives the request a new tracker without a hit, before `get_num_new_matched_tokens` runs. So vLLM computes the
prompt, as with LMCache 0.5.5. In releases with LMCache's own fix, KVF104 handles only preempted requests.
- Releases: LMCache 0.4.5 to 0.5.4. LMCache 0.5.6: only preempted requests. LMCache's modules lmcache_mp_connector_0180
  and _0201: 0.4.4 to 0.5.5. vLLM's copy of the connector: 0.26.0 to 0.33.0.
- Upstream: None known. LMCache 0.5.5 has its own fix ("Bypassing LMCache for request").
- Remove when: LMCache 0.5.4 is no longer in use, and all connectors promise 0 tokens after each failed load.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, Fix, Wrapper, before, multi_process, note, stubs


def fix(module: Any) -> Wrapper:
    make_tracker, preempted = module.LMCacheMPRequestTracker, module.RequestStatus.PREEMPTED
    bypasses = hasattr(module.LMCacheMPRequestState, "BYPASS_LMCACHE")

    def forget_failed_load(connector: Any, request: Any, num_computed_tokens: int) -> None:
        tracker = connector.request_trackers[request.request_id]
        if (
            request.num_computed_tokens
            or tracker.num_scheduled_tokens  # the request has run since, so its load did not fail
            or not _mp.tokens(tracker, "num_lmcache_hit")
            or (bypasses and request.status != preempted)
        ):
            return
        connector.request_trackers[request.request_id] = make_tracker(request)
        note(__name__, f"request {request.request_id}: its load has failed, so vLLM computes it")
        _mp.nothing_cached(connector.scheduler_adapter, request.request_id)

    # The fix skips a request that waits for its lookup. The tracker of this request is not READY.
    return before(forget_failed_load, when=lambda connector, request, *_: _mp.is_in(connector, request, "READY"))


def shows_bug(hook: Any, module: Any) -> bool:
    """Repeat a lookup after a failed load, without and with a preemption. The bug promises the hit a second time."""
    for status in (None, module.RequestStatus.PREEMPTED):
        connector, request = _mp.scheduler_side(module, found=512), stubs.request(2048)
        hook(connector, request, 0)
        connector.request_trackers[request.request_id].state = module.LMCacheMPRequestState.READY
        request.status = status
        if hook(connector, request, 0)[0]:
            return True
    return False


FIX = Fix(
    *multi_process("get_num_new_matched_tokens", shows_bug, fix, lmcache=">=0.4.5,<=0.5.6,!=0.5.5", order=2),
    effect="hang",
    evidence={"KVD208": "", "KVR010": ""},
    scenarios=("mp-failed-load-repoll", "mp-failed-load-repoll-in-tree", "mp-resume-load-circle"),
)
