"""Later requests return wrong text: OffloadingConnector stores blocks that another connector failed to load.

Symptom: Only `Recovered from KV load failure` or `Failing 1 request(s) due to KV load failure` is logged. Later,
requests that begin with the same prompt return wrong text. The bug needs a MultiConnector with OffloadingConnector and
a connector that loads within the step, such as LMCache's in-process connector.

Cause: OffloadingConnector plans its stores when vLLM schedules a step. The plan includes blocks that another connector
loads in this step, and blocks that vLLM computes from the loaded blocks. OffloadingConnector copies the blocks at
the beginning of the next step (offloading/worker.py 0.32.0:265).

OffloadingConnector does not learn that the load has failed, because `update_connector_output` reads only the reports of
OffloadingConnector itself (offloading/scheduler.py 0.32.0:1910). If the request ends with an error
(`kv_load_failure_policy=fail`), OffloadingConnector even stores the rest of the request's prompt (:1591).

Fix: The fix reads the failed blocks from the output that `update_connector_output` gets. If a request has a failed
block, the fix reports the request's stores in flight as failed, so vLLM drops the chunks of these stores.
OffloadingConnector stores the chunks again if the request continues, and no chunk if the request has ended.
- Remove when: `update_connector_output` handles `invalid_block_ids`.
"""

from contextlib import nullcontext

from kvfix.fixes import _offloading
from kvfix.fixes.api import OFFLOADING_SCHEDULER, Any, Fix, note, stubs


def _failed_stores(scheduler: Any, output: Any) -> set[int]:
    """Return the stores in flight of each request that has a failed block."""
    blocks, jobs = output.invalid_block_ids, set[int]()
    if not blocks:
        return jobs
    note(__name__, f"{len(blocks)} blocks failed to load, so stores of their requests are reported as failed")
    for request in scheduler._req_status.values():
        if all(blocks.isdisjoint(group.block_ids) for group in request.group_states):
            continue
        jobs.update(job for job in request.transfer_jobs if scheduler._jobs[job].is_store)
        for group in request.group_states if request.req.is_finished() else ():
            group.block_ids.clear()  # so that OffloadingConnector stores no more of the request
    return jobs


fix = _offloading.fails_jobs("_kvfix_failed_stores", _failed_stores)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a store of block 3 in the step in which the block's load fails. With the bug, the store succeeds."""
    group = stubs.Stub(block_ids=[3], next_stored_chunk_idx=1)
    request = stubs.Stub(
        req=stubs.request(16, is_finished=lambda: False), group_states=(group,), transfer_jobs={7}, req_context=None,
        finished_signaled=False,
    )  # fmt: skip
    job = stubs.Stub(
        req_id=stubs.NAME, pending_count=1, keys={b"key"}, is_store=True, fenced_block_ids=None,
        deferred_fence_block_ids=None,
    )  # fmt: skip
    found: list[bool] = []
    scheduler = stubs.Stub(
        manager=stubs.Stub(complete_store=lambda keys, context, success=True: found.append(success)),
        _jobs={7: job}, _req_status={stubs.NAME: request}, _block_id_to_pending_jobs={}, _stale_job_threshold=0,
        _reset_fence={}, _manager_locked=nullcontext, config=stubs.Stub(blocks_per_chunk=1),
        _sliding_window_groups=(),
    )  # fmt: skip
    scheduler._update_connector_output = lambda output: module.OffloadingConnectorScheduler._update_connector_output(
        scheduler, output
    )
    meta = module.OffloadingWorkerMetadata()
    meta.mark_completed(7)
    hook(scheduler, stubs.Stub(kv_connector_worker_meta=meta, invalid_block_ids={3}))
    return found == [True]


FIX = Fix(
    OFFLOADING_SCHEDULER.update_connector_output(broken=">=0.26.0", probe=shows_bug, fix=fix), effect="wrong output"
)
