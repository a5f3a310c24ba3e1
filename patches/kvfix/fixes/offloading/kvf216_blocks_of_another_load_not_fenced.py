"""Later requests return wrong text: another connector loads into blocks that OffloadingConnector still copies.

Symptom: Nothing is logged. Later, requests with the same prompt return wrong text. The bug needs a MultiConnector with
OffloadingConnector and a connector that loads between steps, such as LMCache's multi-process connector.

Cause: The blocks of an ended request are free while OffloadingConnector still copies them. Before another request
writes to these blocks, OffloadingConnector waits for the copy. But OffloadingConnector checks only the blocks of
requests in the step. A request that loads between steps is not in a step yet. If another connector loads,
`update_state_after_alloc` does not record the request's blocks (offloading/scheduler.py 0.32.0:1149).

Fix: The fix always records the blocks that are allocated for a load.
- Upstream: https://github.com/vllm-project/vllm/issues/46951, https://github.com/vllm-project/vllm/pull/46960 (0.33.0).
"""

from kvfix.fixes.api import GO_ON, OFFLOADING_SCHEDULER, Any, Fix, fix_before, note, stubs


def _wait_for_all(scheduler: Any, *_: Any, **__: Any) -> Any:
    scheduler._current_batch_allocated_block_ids.update(scheduler._block_id_to_pending_jobs)
    return GO_ON


# If no store is in flight, there is nothing to wait for.
@fix_before(when=lambda scheduler, *_, **__: scheduler._block_id_to_pending_jobs, on_fault=_wait_for_all)
def record_blocks(scheduler: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
    if num_external_tokens:
        return
    own = {each.block_id for group in blocks.blocks for each in group if each.block_id}
    scheduler._current_batch_allocated_block_ids.update(own)
    if not own.isdisjoint(scheduler._block_id_to_pending_jobs):
        note(__name__, f"request {request.request_id} waits for copies from its blocks")


def shows_bug(hook: Any, module: Any) -> bool:
    """Allocate block 3 for a load of another connector. With the bug, block 3 is not recorded."""
    allocated: set[int] = set()
    scheduler = stubs.Stub(_current_batch_allocated_block_ids=allocated, _block_id_to_pending_jobs={3: {7}})
    hook(scheduler, stubs.request(16), stubs.Stub(blocks=([stubs.Stub(block_id=3)],)), 0)
    return not allocated


FIX = Fix(
    OFFLOADING_SCHEDULER.update_state_after_alloc(broken=">=0.26.0,<0.33", probe=shows_bug, fix=record_blocks),
    effect="wrong output",
    scenarios=("mp-load-into-blocks-in-copy", "nixl-load-into-blocks-in-copy"),
    no_patch={"vllm": "fixed in 0.33.0"},
)
