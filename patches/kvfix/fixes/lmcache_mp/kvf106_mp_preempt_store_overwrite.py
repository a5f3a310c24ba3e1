"""Hits return wrong text after a preemption: other requests write to blocks while the server still copies them.

Symptom: No error is logged. After preemptions, prompts that hit the cache return wrong text, until the chunks are
evicted. (vLLM's statistics show `Preemptions:`. LMCache 0.5.2 and later log `<preempted> by preempted requests`.)

Cause: The server copies the blocks of a store after the step, and the engine does not wait for the copy. vLLM frees the
blocks of a preempted request at once, and the next step writes to these blocks. The connector of LMCache up to 0.5.1
and vLLM's copy of the connector have no `handle_preemptions`. In LMCache 0.5.2 to 0.5.5 `handle_preemptions` calls
`flush_inflight_stores`, which does nothing on CUDA (transfer_context/worker_transfer.py 0.5.5:648).

Fix: The scheduler marks the metadata of a step that comes after a preemption. When a worker gets marked metadata, it
waits for the stores in flight before the step writes to any block. The worker waits at most LMCache's `mq_timeout`
for each store. Steps without a preemption do not wait. KVF109 makes `store_futures` cover all stores of a request.
- Upstream: https://github.com/LMCache/LMCache/issues/5248, https://github.com/LMCache/LMCache/issues/4612 (in 0.5.6).
- Remove when: LMCache 0.5.5 is no longer in use, and vLLM's copy of the connector waits for stores in flight.
"""

import sys
from contextlib import nullcontext

from kvfix.fixes import _mp, api
from kvfix.fixes.api import GO_ON, Any, Fix, fix_after, fix_before, multi_process, note, stubs

_TRANSFER = "lmcache.v1.multiprocess.transfer_context.worker_transfer"


def _some_preempted(connector: Any, metadata: Any, scheduler_output: Any) -> Any:
    return scheduler_output.scheduled_cached_reqs.resumed_req_ids or scheduler_output.preempted_req_ids


def _mark(connector: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    metadata._kvfix_preempted = True  # vLLM sends the attributes of the object to the workers
    return metadata


mark = fix_after(when=_some_preempted, on_fault=_mark)(_mark)


def _wait_for_all(connector: Any, *_: Any, **__: Any) -> Any:
    if getattr(connector, "worker_adapter", None) is not None:
        for store in list(connector.worker_adapter.store_futures.values()):
            store.wait(timeout=10.0)  # seconds for each store
    return GO_ON


@fix_before(
    only=lambda connector: hasattr(connector, "worker_adapter"),
    when=lambda connector, metadata, *_, **__: hasattr(metadata, "_kvfix_preempted"),
    on_fault=_wait_for_all,
)
def wait(connector: Any, metadata: Any) -> None:
    adapter = connector.worker_adapter
    if adapter is not None and adapter.is_healthy:
        for store in list(adapter.store_futures.values()):
            if not store.query():
                note(__name__, "the worker waited for a store in flight")
                store.wait(timeout=adapter._mq_timeout)


def _worker(store: Any) -> Any:
    """Return a worker's connector with this store in flight."""
    adapter = stubs.Stub(store_futures={stubs.NAME: store}, is_healthy=True, _mq_timeout=1.0)
    return stubs.Stub(worker_adapter=adapter, mq_timeout=1.0)


def connector_shows_bug(hook: Any, module: Any) -> bool:
    """Run a step after a preemption. With the bug, the metadata are not marked, or the worker does not wait."""
    step = stubs.step()
    step.preempted_req_ids.add(stubs.NAME)
    metadata = hook(_mp.scheduler_side(module), step)
    if not getattr(metadata, "need_flush_before_forward", False):
        return True
    store = stubs.Stub(query=lambda: False, wait=stubs.Calls())
    if module.__name__ == api.VLLM_MP.module:
        getattr(module, api.VLLM_MP.name).handle_preemptions(_worker(store), metadata)
        return not store.wait
    return own_shows_bug(hook, module)


def own_shows_bug(hook: Any, module: Any) -> bool:
    """Call `flush_inflight_stores`, as LMCache's `handle_preemptions` does. With the bug, the call does not wait."""
    store = stubs.Stub(query=lambda: False, wait=stubs.Calls())
    context = stubs.Stub(
        _inflight_lock=nullcontext(), _inflight_stores=[store], _store_settled=lambda each: False, _mq_timeout=1.0
    )
    sys.modules[_TRANSFER].LMCacheDrivenTransferContext.flush_inflight_stores(context)
    return not store.wait


def base_shows_bug(hook: Any, module: Any) -> bool:
    """Return True if `handle_preemptions` of vLLM's base class does not wait for a store in flight."""
    store = stubs.Stub(query=lambda: False, wait=stubs.Calls())
    hook(_worker(store), stubs.Stub())
    return not store.wait


FIX = Fix(
    *multi_process("build_connector_meta", connector_shows_bug, mark, lmcache=">=0.4.5,<=0.5.5", order=2),
    api.CONNECTOR_BASE.handle_preemptions(broken=">=0.20.2", probe=base_shows_bug, fix=wait, helper=True),
    api.LMCACHE_MP.handle_preemptions(broken=">=0.5.2,<=0.5.5", probe=own_shows_bug, fix=wait, helper=True),
    effect="wrong output",
    evidence={"KVD308": ""},
    scenarios=("mp-preempt-store-overwrite", "mp-preempt-store-overwrite-in-tree"),
)
