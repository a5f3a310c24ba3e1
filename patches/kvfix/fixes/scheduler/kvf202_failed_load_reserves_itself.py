"""A request waits for ever after a failed load: vLLM counts its blocks twice, and never admits its next load.

Symptom: With `kv_load_failure_policy=recompute` and a connector that loads between steps, the log has `Recovered from
KV load failure: 1 request(s) rescheduled`, and then `Running: 0 reqs, Waiting: 1 reqs` for ever. All blocks are free.

Cause: To avoid a deadlock between loads, vLLM reserves the blocks that all prefills in flight still need. vLLM admits a
load only if enough unreserved blocks are free (scheduler.py 0.32.0:1249). After a load that failed completely, vLLM
frees the request's blocks (0.32.0:3151), but keeps the request in the list of prefills in flight. Before the next load
of the request, vLLM reserves blocks for this request too. So a request that needs over half of all blocks never starts.

Fix: After `_update_waiting_for_remote_kv`, the fix removes a request without computed tokens from `_inflight_prefills`.
- Remove when: vLLM removes a request whose load failed from `_inflight_prefills`.
"""

import inspect

from kvfix.fixes.api import SCHEDULER, Any, Fix, fix_after, note, stubs


@fix_after(when=lambda scheduler, answer, request, *_, **__: not request.num_computed_tokens)
def forget_failed_load(scheduler: Any, answer: None, request: Any) -> None:
    if request in scheduler._inflight_prefills:
        note(__name__, f"request {request.request_id}: its load has failed")
    scheduler._inflight_prefills.discard(request)


def shows_bug(hook: Any, module: Any) -> bool:
    """Let a load fail completely. With the bug, `_inflight_prefills` keeps the request."""
    if "_inflight_prefills" not in inspect.unwrap(module.Scheduler.__init__).__code__.co_names:
        return False
    request = type("Request", (), {"request_id": stubs.NAME, "num_computed_tokens": 0, "num_tokens": 100})()
    scheduler = stubs.Stub(
        connector=object(), failed_recving_kv_req_ids={stubs.NAME}, finished_recving_kv_req_ids={stubs.NAME},
        kv_cache_manager=stubs.Stub(free=lambda request: None), _inflight_prefills={request},
        _mark_prefix_replay=lambda *_, **__: 0,
    )  # fmt: skip
    hook(scheduler, request)
    return request in scheduler._inflight_prefills


FIX = Fix(
    SCHEDULER._update_waiting_for_remote_kv(broken=">=0.26.0", probe=shows_bug, fix=forget_failed_load),
    effect="hang",
    evidence={"KVD208": "", "KVD303": ""},
)
