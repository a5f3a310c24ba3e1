"""The decode worker's memory grows: NixlPushConnector keeps each request that is aborted before it is scheduled.

Symptom: The worker keeps the parameters of each aborted request. `kvfix look` shows the id of the request in
`_recving_metadata` for ever. If the parameters lack a key, EngineCore dies (KVF313).

Cause: If a request ends before vLLM schedules it, request_finished adds the request, without blocks, to the requests
that wait for KV. The addition should make the worker notify the prefill engine (push_scheduler.py 0.32.0:233-243). In
push mode, start_load_kv only records the request as waiting (push_worker.py 0.32.0:197), and no block ever arrives.
The worker of pull mode does not record the request (pull_worker.py 0.32.0:73).

The worker also keeps a request whose tokens all come from another connector, or from vLLM's own prefix cache.
For this request update_state_after_alloc returns early (push_scheduler.py:160). So request_finished adds the request.

Fix: After start_load_kv, the fix removes a request without blocks from `_recving_metadata`. The fix does not notify the
prefill engine. So the prefill engine still keeps the blocks of the request until their lease ends.
- Remove when: The worker does not record a request without blocks.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PUSH_WORKER, Any, Fix, fix_after, note, stubs


@fix_after()
def start_load_kv(worker: Any, answer: None, metadata: Any) -> None:
    for name, meta in metadata.reqs_to_recv.items():
        if not any(meta.local_block_ids):
            note(__name__, f"request {name} is removed from the requests that wait for blocks")
            worker._recving_metadata.pop(name, None)


def shows_bug(hook: Any, module: Any) -> bool:
    """Start the load of a request without blocks. With the bug, the worker waits for blocks."""
    worker = _nixl.worker_side()
    meta = stubs.Stub(local_block_ids=[], remote=stubs.Stub(engine_id="p", block_ids=()))
    metadata = stubs.Stub(
        reqs_to_recv={stubs.NAME: meta}, push_registrations={}, push_finished_blocks={}, reqs_in_batch=(),
        reqs_not_processed=(), reqs_to_send={}, scheduler_clock=0.0,
    )  # fmt: skip
    hook(worker, metadata)
    return bool(worker._recving_metadata)


FIX = Fix(
    NIXL_PUSH_WORKER.start_load_kv(broken=">=0.32", probe=shows_bug, fix=start_load_kv),
    effect="leak",
    evidence={"KVR009": r"^_recving_metadata "},
)
