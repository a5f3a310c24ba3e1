"""A store is under way, its request is preempted, others write to its blocks: their KV is stored under its keys.

## Symptom
No error. After preemptions (`Preemptions:` in vLLM's statistics; `<preempted> by preempted requests` from LMCache 0.5.2
on), prompts that hit the cache get wrong text, until the chunks are evicted.

## Cause
The server copies the blocks of a store after the step; the engine does not wait for it. A preempted request gives its
blocks back at once and the next step writes to them. LMCache up to 0.5.1 and vLLM's copy have no `handle_preemptions`;
0.5.2 to 0.5.5 have it, and it ends in a `flush_inflight_stores` that is `pass` for the transfer used on CUDA
(transfer_context/worker_transfer.py 0.5.5:648).

## Fix
The scheduler marks the metadata of a step that comes after a preemption. A worker that is handed marked metadata waits
for the stores that are under way, at most for LMCache's own `mq_timeout` each, before anything is written. Steps
without a preemption do not wait. That a request has all its stores on the list, KVF109 sees to.

## Releases
LMCache 0.4.5 to 0.5.5, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
https://github.com/LMCache/LMCache/issues/5248, https://github.com/LMCache/LMCache/issues/4612, fixed in 0.5.6.

## Remove when
LMCache 0.5.5 is no longer in use, and vLLM's copy waits.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after, before
from kvfix.fix import Fix, Patch
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_TRANSFER = "lmcache.v1.multiprocess.transfer_context.worker_transfer"
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def mark(module: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(connector: Any, metadata: Any, scheduler_output: Any) -> Any:
        metadata._kvfix_preempted = True  # an attribute of the object, so it travels to the workers
        return metadata

    resumed = "scheduler_output.scheduled_cached_reqs.resumed_req_ids"
    return after(build_connector_meta, when=f"{resumed} or scheduler_output.preempted_req_ids")


def wait(module: ModuleType) -> Callable[..., Any]:
    def wait_for_stores(connector: Any, metadata: Any) -> None:
        adapter = getattr(connector, "worker_adapter", None)
        if adapter is not None and adapter.is_healthy:
            for store in list(adapter.store_futures.values()):
                if not store.query():
                    store.wait(timeout=adapter._mq_timeout)

    return before(wait_for_stores, when='getattr(metadata, "_kvfix_preempted", False)')


class _Store:
    """A store under way that knows whether somebody has waited for it."""

    waited = False

    def query(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        self.waited = True
        return True


def _worker(store: _Store) -> Any:
    """A worker's connector with this store under way."""
    adapter = SimpleNamespace(store_futures={"kvfix-probe": store}, is_healthy=True, _mq_timeout=1.0)
    return SimpleNamespace(worker_adapter=adapter, mq_timeout=1.0)


def connector_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A step before which a request was preempted: is it marked, and does a worker then wait?"""
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids={"kvfix-probe"},
    )
    metadata = hook(_mp.scheduler_side(module), output)
    if not getattr(metadata, "need_flush_before_forward", False):
        return True
    store = _Store()
    if module.__name__ == _mp.IN_TREE[1]:
        getattr(module, _mp.IN_TREE[2]).handle_preemptions(_worker(store), metadata)
        return not store.waited
    return own_shows_bug(hook, module)


def own_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """What LMCache's own hook comes to in the end."""
    store = _Store()
    context = SimpleNamespace(
        _inflight_lock=_mp.Lock(), _inflight_stores=[store], _store_settled=lambda each: False, _mq_timeout=1.0
    )
    sys.modules[_TRANSFER].LMCacheDrivenTransferContext.flush_inflight_stores(context)
    return not store.waited


def base_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """It waits for nothing, which is right for connectors that store within the step."""
    store = _Store()
    hook(_worker(store), SimpleNamespace())
    return not store.waited


_, _MODULE, _OWNER = _mp.LMCACHE
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        *_mp.patches("build_connector_meta", connector_shows_bug, mark, lmcache=">=0.4.5,<=0.5.5", vllm=">=0.26.0"),
        # What the workers call first, in connectors that have no such hook of their own, and in those that have. It is
        # handed the metadata since https://github.com/vllm-project/vllm/pull/34805; none of them runs on older vLLM.
        Patch("vllm", _BASE, "KVConnectorBase_V1.handle_preemptions", ">=0.20.2", base_shows_bug, wait, helper=True),
        Patch("lmcache", _MODULE, f"{_OWNER}.handle_preemptions", ">=0.5.2,<=0.5.5", own_shows_bug, wait, helper=True),
    ),
)
