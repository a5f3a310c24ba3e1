"""A decode instance (kv_consumer) cannot evict chunks: it never releases the pins of its lookups.

Symptom: A consumer logs `Pin timeout detected for MemoryObj ...` and `Force unpinned ... timeout objects`. Before the
pin timeout, the cache cannot evict chunks that are no longer needed.

Cause: A consumer saves nothing. So `wait_for_save` returns early, and does not unpin the requests of the step.

Fix: After `wait_for_save` on a consumer, the fix unpins the requests of the step.
- Upstream: https://github.com/LMCache/LMCache/pull/2786; fixed in 0.4.3.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_after, note, stubs


@fix_after()
def fix(impl: Any, answer: None) -> None:
    if impl.kv_role == "kv_consumer":
        for request in impl._parent._get_connector_metadata().requests:
            note(__name__, f"released the pins of request {request.req_id}")
            impl.lmcache_engine.lookup_unpin(request.req_id)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Run a step with one request on a consumer. With the bug, the consumer does not unpin the request."""
    unpin, meta = stubs.Calls(), stubs.Stub(req_id=stubs.NAME, save_spec=None)
    hook(stubs.worker_side(adapter, meta, kv_role="kv_consumer", lmcache_engine=stubs.Stub(lookup_unpin=unpin)))
    return not unpin


FIX = Fix(
    LMCACHE_V1.wait_for_save(broken=">=0.3.9,<0.4.3", probe=shows_bug, fix=fix, order=2),
    effect="leak",
    evidence={"KVD401": "", "KVR009": "^pins of the worker "},
    scenarios=("consumer-pins-left",),
)
