"""A request with two stores is reported done at the end of the first: its blocks are freed while they are copied.

## Symptom
No error. Prompts longer than a step (chunked prefill) that hit the cache get wrong text, until the chunks are evicted.

## Cause
A worker keeps one store for each request: the next one takes the place of the last (vllm_multi_process_adapter.py
0.5.6:1848). And `finished_stores` keeps that a store of the request has ended: when the request ends, that is taken for
the end of all (0.5.6:2651), while the server still copies the last chunks. vLLM frees the blocks, others write to them,
and their KV is stored under the keys of the request.

## Fix
After `submit_store_request`: the store that is kept for a request is done when all of its stores are, and an earlier
one that has ended does not count for it.

## Releases
LMCache 0.4.2 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/3640 (the futures of a request overwrite each other).

## Remove when
The worker keeps all stores of a request.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import View, after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def both(first: Any, second: Any) -> Any:
    """Two futures as one: of the stores of a request, in the order in which they were handed over."""

    def each(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(first, name)(*args, **kwargs) and getattr(second, name)(*args, **kwargs)

    return View(second, **{name: each(name) for name in ("query", "wait", "result")})


def correct(module: ModuleType) -> Callable[..., Any]:
    def submit_store_request(adapter: Any, answer: Any, first: Any, request_id: str, *_: Any, **__: Any) -> Any:
        store = adapter.store_futures.get(request_id)
        if store is not first:
            adapter.finished_stores.discard(request_id)
            if first is not None:
                adapter.store_futures[request_id] = both(first, store)
        return answer

    under_way = "adapter.store_futures[request_id]"
    under_way = f"{under_way} if request_id in adapter.store_futures and not {under_way}.query() else None"
    known = "first is not None or request_id in adapter.finished_stores"
    return after(submit_store_request, when=known, noted=under_way)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Two stores of one request, of which only the second is done, after one that has ended."""
    stores = [SimpleNamespace(query=lambda: False), SimpleNamespace(query=lambda: True)]
    for store in stores:
        store.to_cuda_future = lambda store=store: store  # 0.4.5 sends the request itself
    queue = list(stores)
    adapter = SimpleNamespace(
        _ensure_heartbeat_started=lambda: None,
        is_healthy=True,
        is_kv_writer=True,
        lazy_offload=False,
        instance_id=0,
        kv_caches={},
        blocks_in_chunk=4,
        mq_client=SimpleNamespace(submit_request=lambda *_: queue.pop(0)),
        transfer_ctx=SimpleNamespace(submit_store=lambda *_, **__: queue.pop(0)),
        store_futures={},
        store_events={},
        finished_stores={"kvfix-probe"},
        dispatcher=None,
        _create_key=lambda *_, **__: None,
        _block_ids_per_group=lambda op: [op.block_ids],
        _kv_events_enabled=False,
    )
    event = SimpleNamespace(ipc_handle=lambda: b"")
    for _ in stores:
        hook(adapter, "kvfix-probe", module.LoadStoreOp(token_ids=[0] * 64, block_ids=[3, 4, 5, 6], end=64), event)
    return adapter.store_futures["kvfix-probe"].query() or "kvfix-probe" in adapter.finished_stores


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPWorkerAdapter.submit_store_request",
            broken=">=0.4.2,<=0.5.6",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
