"""A load that failed is reported as done without its blocks: vLLM reads what was never loaded.

## Symptom
ERROR `Something went wrong when processing the retrieve request for request_id=..., result=False` in the worker, then
wrong text with HTTP 200. The server says why: `Some keys not found during retrieve!`, `Cannot retrieve keys due to
exception`, or `No GPU context registered for instance ID`.

## Cause
`LMCacheMPWorkerAdapter.get_finished` logs the result and drops the blocks (vllm_multi_process_adapter.py
0.5.4:1635-1648). vLLM is told that the load is done, and nothing by `get_block_ids_with_load_errors`.

## Fix
After `get_finished`: the blocks of each load that it has taken off its list, and whose result is false, are among the
blocks with load errors. vLLM then does what `kv_load_failure_policy` says: `fail` (its default) ends the request with
an error, `recompute` computes it.

## Releases
LMCache 0.4.2 to 0.5.4, with its own connector and with vLLM's copy. Earlier ones have no way to report blocks.

## Upstream
https://github.com/LMCache/LMCache/issues/3388, fixed in 0.5.5.

## Remove when
LMCache 0.5.4 is no longer in use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_MODULE = "lmcache.integration.vllm.vllm_multi_process_adapter"


def correct(module: ModuleType) -> Callable[..., Any]:
    def get_finished(adapter: Any, answer: Any, under_way: dict[str, Any], *_: Any) -> Any:
        for request_id, (future, blocks) in under_way.items():
            # A server that is silent leaves futures that are not done; the hook has reported those itself.
            if request_id not in adapter.retrieve_futures and future.query() and not future.result(timeout=60):
                adapter.error_block_ids.update(blocks)
        return answer

    loads = "adapter.retrieve_futures and dict(adapter.retrieve_futures)"
    return after(get_finished, when="under_way", noted=loads)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """One load of blocks 3 and 4, whose result is false."""
    failed = SimpleNamespace(query=lambda: True, result=lambda timeout=None: False)
    adapter = SimpleNamespace(
        is_healthy=True,
        dispatcher=None,
        lazy_offload=True,
        store_futures={},
        store_events={},
        retrieve_futures={"kvfix-probe": (failed, [3, 4])},
        retrieve_events={},
        error_block_ids=set(),
        request_telemetry=SimpleNamespace(on_request_store_finished=lambda **_: None),
        _dropped_retrieves=set(),
        _completed_store_requests={},
        _failed_request_ids=set(),
        _failed_store_requests=set(),
        _pending_store_kv_events={},
        _process_finished_stores=lambda *_: set(),
    )
    hook(adapter, *([set()] if hook.__name__ == "get_finished" else []))
    return bool(adapter.error_block_ids != {3, 4})


FIX = Fix(
    __name__,
    __doc__,
    patches=tuple(
        Patch("lmcache", _MODULE, f"LMCacheMPWorkerAdapter.{name}", broken, shows_bug, correct)
        for name, broken in (("get_finished", ">=0.4.2,<=0.5.4"), ("get_finished_with_lazy_offload", "==0.5.4"))
    ),
)
