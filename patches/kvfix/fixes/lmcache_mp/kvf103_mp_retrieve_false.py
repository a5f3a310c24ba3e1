"""Requests return wrong text after a failed load: LMCache reports the load as done and reports no failed block.

Symptom: The worker logs ERROR `Something went wrong when processing the retrieve request for request_id=...,
result=False`. Then the request returns wrong text with HTTP 200. The log of the server has the reason: `Some keys not
found during retrieve!`, `Cannot retrieve keys due to exception`, or `No GPU context registered for instance ID`.

Cause: `LMCacheMPWorkerAdapter.get_finished` logs the failure, but reports the load to vLLM as done
(vllm_multi_process_adapter.py 0.5.4:1655-1668). `get_block_ids_with_load_errors` does not report the load's blocks.

Fix: When the future of a load returns a failure, the fix adds the load's blocks to the blocks with load errors. vLLM
then ends the request with an error, or computes the tokens again (`kv_load_failure_policy`).
- Releases: LMCache 0.4.2 to 0.5.4, with its own connector or vLLM's copy. Earlier releases cannot report failed blocks.
- Upstream: https://github.com/LMCache/LMCache/issues/3388, fixed in 0.5.5.
"""

import inspect

from kvfix.fixes import _mp
from kvfix.fixes.api import MP_WORKER_ADAPTER, Any, Fix, View, engine_log, fix_after, note, stubs


def load(adapter: Any, future: Any, blocks: Any) -> Any:
    def failed() -> bool:
        adapter.error_block_ids.update(blocks)
        note(__name__, f"reported {len(blocks)} blocks of a failed load to vLLM")
        return True

    def failed_anew() -> None:
        adapter.error_block_ids = {*adapter.error_block_ids, *blocks}

    def result(*args: Any, **kwargs: Any) -> Any:
        loaded = future.result(*args, **kwargs)
        if not loaded and not engine_log.guarded(f"{__name__}.load", failed):
            engine_log.guarded(f"{__name__}.load", failed_anew)
        return loaded

    return View(future, result=result)


def _failed(adapter: Any, answer: Any, request_id: str, *_: Any, **__: Any) -> Any:
    """If the fix itself raises, report the blocks of the load as failed, even if the load succeeds."""
    if request_id in adapter.retrieve_futures:
        adapter.error_block_ids.update(adapter.retrieve_futures[request_id][1])
    return answer


# The fix acts only on started loads. If the worker is unhealthy, LMCache starts no load and reports the blocks itself.
@fix_after(when=lambda adapter, answer, request_id, *_, **__: request_id in adapter.retrieve_futures, on_fault=_failed)
def fix(adapter: Any, answer: Any, request_id: str, *_: Any, **__: Any) -> None:
    future, blocks = adapter.retrieve_futures[request_id]
    adapter.retrieve_futures[request_id] = (load(adapter, future, blocks), blocks)


def shows_bug(hook: Any, module: Any) -> bool:
    """Let a load of two blocks fail, and read the result of the load. With the bug, LMCache reports no block."""
    failed = stubs.Stub(query=lambda: True, wait=lambda timeout=None: True, result=lambda timeout=None: False)
    failed.to_cuda_future = lambda: failed  # up to 0.4.5 the hook calls to_cuda_future
    adapter = _mp.worker_side(
        lazy_offload=True, request_telemetry=stubs.Nothing(), mq_client=stubs.Stub(submit_request=lambda *_: failed),
        transfer_ctx=stubs.Stub(submit_retrieve=lambda *_, **__: failed),
    )  # fmt: skip
    op = module.LoadStoreOp(token_ids=[0] * 32, block_ids=[3, 4], start=0, end=32)
    hook(adapter, stubs.NAME, op, stubs.Stub(ipc_handle=lambda: b""))
    if adapter.error_block_ids:
        raise LookupError("the load did not start")
    _mp.get_finished(inspect.unwrap(module.LMCacheMPWorkerAdapter.get_finished), adapter)
    return bool(adapter.error_block_ids != {3, 4})


FIX = Fix(
    MP_WORKER_ADAPTER.submit_retrieve_request(broken=">=0.4.2,<=0.5.4", probe=shows_bug, fix=fix, order=2),
    effect="wrong output",
    evidence={"KVD301": "", "KVD310": ""},
    scenarios=("mp-retrieve-false", "mp-retrieve-false-in-tree"),
)
