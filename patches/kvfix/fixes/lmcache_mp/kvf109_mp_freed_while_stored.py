"""Hits return wrong text after chunked prefill: vLLM frees a request's blocks while its second store copies them.

Symptom: No error is logged. After chunked prefill, hits return wrong text until the chunks are evicted.

Cause: A worker keeps only the future of a request's last store (vllm_multi_process_adapter.py 0.5.6:1853).
`finished_stores` keeps the id of a request whose first store has ended. When the request ends, the worker finds this id
and reports all stores of the request as done (0.5.6:2650). vLLM frees the blocks and other requests write to these
blocks, but the server still copies the last chunks.

Fix: The fix joins the futures of all stores of a request into one future. This future is done only when all stores are
done. The end of an earlier store no longer marks the request as done.
- Upstream: https://github.com/LMCache/LMCache/issues/3640 (the futures of a request overwrite each other).
- Remove when: The worker keeps all stores of a request.
"""

import functools

from kvfix.fixes import _mp
from kvfix.fixes.api import MP_WORKER_ADAPTER, Any, Fix, Steps, View, fix_around, note, stubs


def both(first: Any, second: Any) -> Any:
    """Return one future for all stores of a request. first: the future of one or several earlier stores."""
    stores = [*getattr(first, "_kvfix_stores", (first,)), second]
    asks = {name: functools.partial(_ask, stores, name) for name in ("query", "wait", "result")}
    return View(second, _kvfix_stores=stores, **asks)


def _ask(stores: list[Any], name: str, *args: Any, **kwargs: Any) -> Any:
    for store in stores:  # a loop, because nested calls for 1,000 stores could exceed Python's recursion limit
        answer = getattr(store, name)(*args, **kwargs)
        if not answer:
            break
    return answer


@fix_around()
def fix(adapter: Any, request_id: str, *_: Any, **__: Any) -> Steps:
    first = adapter.store_futures.get(request_id)
    is_in_flight = first is not None and not first.query()
    yield
    store = adapter.store_futures.get(request_id)
    if store is not first:
        if is_in_flight or request_id in adapter.finished_stores:
            note(__name__, f"request {request_id} has a second store in flight")
        adapter.finished_stores.discard(request_id)
        if is_in_flight:
            adapter.store_futures[request_id] = both(first, store)


def shows_bug(hook: Any, module: Any) -> bool:
    """After a store has ended, start two stores and end the second one. With the bug, all stores count as done."""
    stores = [stubs.Stub(query=lambda: False), stubs.Stub(query=lambda: True)]
    for store in stores:
        store.to_cuda_future = lambda store=store: store  # LMCache 0.4.5 calls to_cuda_future
    queue = list(stores)
    adapter = _mp.worker_side(
        is_kv_writer=True, finished_stores={stubs.NAME}, _kv_events_enabled=False,
        mq_client=stubs.Stub(submit_request=lambda *_: queue.pop(0)),
        transfer_ctx=stubs.Stub(submit_store=lambda *_, **__: queue.pop(0)),
    )  # fmt: skip
    event = stubs.Stub(ipc_handle=lambda: b"")
    for _ in stores:
        hook(adapter, stubs.NAME, module.LoadStoreOp(token_ids=[0] * 64, block_ids=[3, 4, 5, 6], end=64), event)
    return adapter.store_futures[stubs.NAME].query() or stubs.NAME in adapter.finished_stores


FIX = Fix(
    MP_WORKER_ADAPTER.submit_store_request(broken=">=0.4.2,<=0.5.6", probe=shows_bug, fix=fix),
    effect="wrong output",
    evidence={"KVR009": r"^worker_adapter\.finished_stores "},
    scenarios=("mp-freed-while-stored", "mp-freed-while-stored-in-tree"),
)
