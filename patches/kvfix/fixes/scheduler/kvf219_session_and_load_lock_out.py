"""All requests wait for ever: a streaming session and a loaded request each hold blocks that the other one needs.

Symptom: The log has `Running: 0 reqs, Waiting: N reqs` for ever. There is no throughput and no error, and the KV cache
is nearly full. Clients send streaming input, and the connector loads between steps.

Cause: vLLM reserves the blocks for the whole prompt of a load (scheduler.py 0.32.0:1249). But a running session takes
reserved blocks too, and keeps these blocks after its turn. Then the session's next input and a loaded request both need
more blocks. `schedule` stops at the first request for which too few blocks are free (:1282).

Fix: The fix acts if three steps have scheduled nothing and nothing is in flight. The fix then frees the blocks of the
newest loaded request that is no session, so that another request can run. vLLM computes the loaded request later. The
fix acts only if LMCacheMPConnector is the only connector, without MultiConnector. Only this connector accepts a request
that restarts with zero computed tokens.

Mixed roll-out: Engines with and without the fix work together. The fix is opt-in because it drops a loaded prompt.
- Releases: vLLM 0.32.0 and 0.33.0. Earlier releases have other queues, and the bug KVF903.
- Upstream: https://github.com/vllm-project/vllm/issues/45388, https://github.com/vllm-project/vllm/pull/57104
- Remove when: vLLM counts a session's blocks as reserved, or a loaded request can return its blocks.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import SCHEDULER, Any, Fix, Steps, fix_around, note

_LOADING = "WAITING_FOR_REMOTE_KVS"


# In almost all steps, no waiting request holds blocks, so the fix takes almost no time.
@fix_around(when=lambda scheduler, *_, **__: scheduler.kv_holding_waiting)
def schedule(scheduler: Any, *_: Any, **__: Any) -> Steps:
    output = yield
    is_idle = not scheduler.running and not output.total_num_scheduled_tokens
    scheduler._kvfix_idle = getattr(scheduler, "_kvfix_idle", 0) + 1 if is_idle else 0
    if scheduler._kvfix_idle >= 3:  # a connector may report a load or a store in the first two idle steps
        scheduler._kvfix_idle = 0
        request = _to_give_back(scheduler)
        if request is not None:
            note(__name__, f"request {request.request_id} returns its blocks")
            _give_back(scheduler, request)


def _to_give_back(scheduler: Any) -> Any:
    """Return the last loaded request if its blocks would let another request run, else None."""
    if any(request.is_finished() for request in scheduler.requests.values()):
        return None  # a finished request frees its blocks when the blocks are stored
    ready, manager = [], scheduler.kv_cache_manager
    for request in scheduler.kv_holding_waiting:
        if request.status.name == _LOADING and request.request_id not in scheduler.finished_recving_kv_req_ids:
            return None  # a load is in flight
        if request.status.name in ("WAITING", "PREEMPTED", _LOADING):
            ready.append(request)
    loaded = [request for request in ready if not request.resumable and not request.num_in_flight_tokens]
    trackers = getattr(scheduler.connector, "request_trackers", {})
    found = [(each, trackers.get(each.request_id)) for each in loaded]
    loaded = [each for each, tracker in found if tracker and _mp.tokens(tracker, "num_lmcache_hit") > 0]
    if len(ready) < 2 or not loaded:
        return None
    last, free = loaded[-1], manager.block_pool.get_num_free_blocks()
    needs = [scheduler._request_remaining_blocks(request) for request in ready if request is not last]
    held = sum(not block.is_null for group in manager.get_blocks(last.request_id).blocks for block in group)
    return last if free < needs[0] and min(needs) <= free + held else None


def _give_back(scheduler: Any, request: Any) -> None:
    """Free all blocks of the request, as `_update_waiting_for_remote_kv` does if a load got no token (:3151)."""
    name = request.request_id
    scheduler.kv_holding_waiting.remove_requests([request])
    scheduler.finished_recving_kv_req_ids.discard(name)
    scheduler.failed_recving_kv_req_ids.discard(name)
    scheduler._inflight_prefills.discard(request)
    scheduler._set_kv_fetch_stage(request, None)
    scheduler.deferred_waiting.discard(request)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    states = type(request.status)
    request.status = states.PREEMPTED if request.num_preemptions else states.WAITING
    scheduler._enqueue_waiting_request(request)


FIX = Fix(
    SCHEDULER.schedule(broken=">=0.32.0", fix=schedule, order=1),
    effect="hang",
    evidence={"KVD202": ""},
    # In runs of the test lab, the fix may act although another request would soon return its blocks.
    changes_healthy=("mp",),
    no_patch={"vllm": "vLLM must decide which request frees blocks: https://github.com/vllm-project/vllm/pull/57104"},
    opt_in=True,
)
