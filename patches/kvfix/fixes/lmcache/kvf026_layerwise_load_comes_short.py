"""A layerwise load that finds fewer chunks than promised kills the worker, or the request returns wrong text.

Symptom: With `use_layerwise`, if none of the promised chunks is left, EngineCore dies with `UnboundLocalError: cannot
access local variable 'mem_obj_consumer' where it is not associated with a value`. If only some chunks are left, the
request returns wrong text, and LMCache only logs `Retrieved ... tokens`, with fewer tokens than promised.

Cause: `retrieve_layer` loads only chunks before the first missing chunk. LMCache can evict a chunk after the lookup if
the chunk's pins time out or other requests release the pins (KVF018). If no chunk is left, `retrieve_layer` reads an
unset variable (0.5.6 cache_engine.py:1133). If some chunks are left, the adapter only logs the number of
tokens (vllm_v1_adapter.py:990-992). Without `use_layerwise` the adapter reports missing blocks as failed (:890-896).

Fix: The first value that `retrieve_layer` yields is the number of tokens to load. The fix reports the blocks of
promised tokens beyond this number as failed, before the step saves anything. vLLM then computes these tokens again, or
ends the request with an error (`kv_load_failure_policy`). If there is nothing to load, the fix stops `retrieve_layer`
and yields empty results instead. KVF007 prevents the step from storing the KV that the step computes for this request.
- Releases: LMCache 0.3.9.post1 to 0.5.6. LMCache 0.3.9 cannot report failed blocks. So the fix keeps the
  crash in 0.3.9, because a request would return wrong text without the crash.
- Upstream: https://github.com/LMCache/LMCache/issues/899
- Remove when: `start_load_kv` records the failed blocks of a layerwise load.
"""

from collections.abc import Iterator

from kvfix.fixes import _closed, _lmcache
from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, engine_log, fix_around, note, replaced, stubs

_WHERE = f"{__name__}.retrieve_layer"


@fix_around(only=_lmcache.is_layerwise, on_fault=_closed.worker_loads_fail)
def fix(impl: Any, *_: Any, **__: Any) -> Steps:
    find, load = _lmcache.find_load(impl), impl.lmcache_engine.retrieve_layer

    def retrieve_layer(tokens: Any, mask: Any = None, **more: Any) -> Any:
        layers, request = load(tokens, mask, **more), engine_log.guarded(_WHERE, find, tokens)
        if request is None:  # `find` has failed, so the load's request is unknown
            engine_log.guarded(_WHERE, _closed.worker_loads_fail, impl)
            return layers
        return _layers(impl, layers, request, mask)

    with replaced(impl.lmcache_engine, retrieve_layer=retrieve_layer):
        return (yield)


def _layers(impl: Any, layers: Any, request: Any, mask: Any) -> Iterator[Any]:
    """Yield as `retrieve_layer` does: the number of tokens, None for each layer, and the mask of loaded tokens."""
    first = next(layers, None)
    loaded = engine_log.guarded(_WHERE, _report, impl, request, mask, first)
    if loaded is None:
        engine_log.guarded(_WHERE, _closed.load_fails, impl, request)
    yield first
    if loaded != 0:
        yield from layers
        return
    layers.close()
    for _ in range(impl.num_layers):
        yield None
    yield mask & False


def _report(impl: Any, request: Any, mask: Any, first: Any) -> int:
    """Record the blocks that will not be loaded, and return how many tokens will be loaded.

    first: the first value that `retrieve_layer` yields. The value is a number of tokens, or None for 0 tokens. If
    LMCache is unhealthy, the value is a mask.
    """
    loaded = 0 if first is None or first.dim() else int(first)
    start = len(mask) - int(mask.sum())
    expected, arrived = mask.clone(), mask & False
    expected[: request.load_spec.vllm_cached_tokens] = False
    arrived[start : start + loaded] = True
    failed = impl.record_failed_blocks(request.req_id, expected, arrived, request.slot_mapping)
    impl._invalid_block_ids.update(failed)
    if failed:
        note(__name__, f"request {request.req_id}: {len(failed)} blocks were not loaded")
    return loaded


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Promise 32 tokens for blocks 3 and 4. Load only block 3. With the bug, block 4 is not recorded as failed."""
    import torch  # the adapter has already imported torch

    load = stubs.Stub(vllm_cached_tokens=0, lmcache_cached_tokens=32, can_load=True)
    mask = torch.arange(32) < 16
    engine = stubs.Stub(retrieve_layer=lambda *_, **__: iter([torch.sum(mask), None, mask]))
    more = {"lmcache_engine": engine, "use_layerwise": True, "_invalid_block_ids": set(), "num_layers": 1}
    impl = stubs.worker_side(adapter, stubs.metadata(32, load_spec=load), **more)
    impl.record_failed_blocks = adapter.LMCacheConnectorV1Impl.record_failed_blocks.__get__(impl)
    hook(impl, stubs.Stub(attn_metadata=object()))
    if impl._invalid_block_ids not in (set(), {4}):
        raise LookupError(f"the hook records blocks {impl._invalid_block_ids} as failed, not block 4")
    return not impl._invalid_block_ids


FIX = Fix(
    LMCACHE_V1.start_load_kv(broken=">=0.3.9.post1", probe=shows_bug, fix=fix, order=3),
    effect="wrong output",
    evidence={"KVD810": "", "KVR011": "mem_obj_consumer"},
    scenarios=("layerwise-load-finds-nothing", "layerwise-load-finds-a-part"),
)
