"""EngineCore dies at the first aborted request: LMCache asserts that the scheduler has a cache engine.

Symptom: When a request is aborted, EngineCore dies with a bare `AssertionError` at `assert self.lmcache_engine is not
None` in `request_finished` (vllm_v1_adapter.py:1779 in 0.4.5).

Cause: `request_finished` reports the abort to the storage through the cache engine. The workers have a cache engine,
but the scheduler has one only if `enable_scheduler_bypass_lookup` is set.

Fix: The fix handles an abort like a normal end. If loading is asynchronous, the fix also cancels the lookup.
- Upstream: https://github.com/LMCache/LMCache/issues/3337, https://github.com/LMCache/LMCache/pull/3340 (in 0.5.1).
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, View, fix_around, stubs


@fix_around(
    when=lambda impl, request, *_, **__: (
        impl.lmcache_engine is None and request.status == LMCACHE_V1.imported.RequestStatus.FINISHED_ABORTED
    )
)
def fix(impl: Any, request: Any, block_ids: Any) -> Steps:
    yield View(request, status=None), block_ids
    if impl.async_loading and impl.lookup_client is not None:
        impl.lookup_client.cancel_lookup(request.request_id)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Abort a request in the scheduler role. The bug raises AssertionError."""
    request = stubs.request(16, status=adapter.RequestStatus.FINISHED_ABORTED)
    return stubs.raises(AssertionError, hook, stubs.scheduler_side(), request, [])


FIX = Fix(
    LMCACHE_V1.request_finished(broken=">=0.4.5,<0.5.1", probe=shows_bug, fix=fix, order=1),
    effect="crash",
    evidence={"KVD108": "", "KVR011": "^request_finished: AssertionError$"},
    scenarios=("abort-engine-assert",),
)
