"""A kv_producer stores the prompt of a request although the request asks for `lmcache.skip_save`.

Symptom: The only log line of the request is `Storing KV cache for ...`. Later requests hit the stored chunks.

Cause: If LMCache did a lookup for a request, the request has metadata, even with `lmcache.skip_save`. A kv_producer
stores every request that has metadata, even if the request names no decoder (0.5.6 vllm_v1_adapter.py:1152).

Fix: The worker does not store a request with `lmcache.skip_save`, unless the request names a decoder (`disagg_spec`).
- Remove when: `wait_for_save` of a kv_producer ignores `can_save` only for requests that name a decoder.
"""

from kvfix.fixes import _lmcache
from kvfix.fixes.api import LMCACHE_V1, Any, Fix


def _must_not_be_stored(request: Any) -> Any:
    configs = getattr(request, "request_configs", None)
    return configs and configs.get("lmcache.skip_save") and request.disagg_spec is None


fix, fix_layers = _lmcache.skip_producer_stores(_must_not_be_stored)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Save a request with `lmcache.skip_save` in a kv_producer. With the bug, the worker stores the request."""
    return _lmcache.stores(hook, adapter, {"kv_role": "kv_producer"}, request_configs={"lmcache.skip_save": True})


FIX = Fix(
    LMCACHE_V1.wait_for_save(broken=">=0.3.9", probe=shows_bug, fix=fix, order=3),
    LMCACHE_V1.start_load_kv(broken=">=0.3.9", fix=fix_layers, order=5, helper=True),
    effect="wrong output",
)
