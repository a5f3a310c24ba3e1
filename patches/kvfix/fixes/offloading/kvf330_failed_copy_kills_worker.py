"""EngineCore dies when OffloadingConnector fails to copy blocks: the worker asserts that every copy succeeds.

Symptom: The worker dies with a bare `AssertionError` at `assert transfer_result.success` in `get_finished` of
offloading/worker.py, and EngineCore dies too. vLLM's OffloadingWorker for CPU memory never reports a failed copy.
An OffloadingWorker from `spec_module_path`, such as llm-d's for a file system, can report a failed copy.

Cause: `get_finished` asserts that each copy has succeeded: "we currently do not support job failures"
(offloading/worker.py 0.32.0:288). CPUOffloadingManager and vLLM's scheduler could handle failed stores and loads.

Fix: The fix shows all copies to `get_finished` as successful, and adds the failed copies to the worker's report. The
manager drops the chunks of a failed store. After a failed load vLLM computes the tokens, or ends the request
(`kv_load_failure_policy`). The request loads nothing more, so that vLLM does not retry an unreadable chunk for ever.
- Releases: vLLM 0.26.0 to 0.33.0. The fix needs 0.32.0, which can report the requests whose loads failed.
- Upstream: https://github.com/vllm-project/vllm/issues/39732, https://github.com/vllm-project/vllm/pull/52838 (open).
- Remove when: `get_finished` of offloading/worker.py handles a result without success.
"""

from kvfix.fixes import _offloading, api
from kvfix.fixes.api import Any, Fix, Steps, View, engine_log, fix_around, fix_before, note, replaced, stubs

#: The fix adds _REQUESTS (requests whose load failed) to the worker, and _JOBS (failed jobs) to scheduler and report.
_REQUESTS, _JOBS = "_kvfix_failed_requests", "_kvfix_failed_jobs"
#: Attribute of the metadata and of the worker. The attribute exists only if the scheduler has this fix.
_TOLD = "_kvfix_knows_failed_copies"

tells_worker = _offloading.tells_worker(_TOLD)
get_transfer_results = _offloading.reports_failed_loads("connector_worker", _REQUESTS)
aggregate = _offloading.combines_reports(_JOBS, "completed_jobs")
update_connector_output = _offloading.fails_jobs(_JOBS, lambda _, out: getattr(out.kv_connector_worker_meta, _JOBS, ()))


@fix_around(when=lambda worker, *_, **__: getattr(worker, _TOLD, False))
def get_finished(worker: Any, finished_req_ids: Any) -> Steps:
    own = worker.worker

    def finished() -> Any:
        done = own.get_finished()
        # If the fix cannot record the failed copies, the copies stay marked as failed, so vLLM's assertion fails.
        noted = engine_log.guarded(f"{__name__}.get_finished", _note_failed, worker, done)
        return done if noted is None else noted

    with replaced(worker, worker=View(own, get_finished=finished)):
        return (yield)


def _note_failed(worker: Any, done: Any) -> Any:
    """Record the failed copies for the scheduler, and return all copies as successful."""
    failed = {each.job_id for each in done if not each.success}
    if failed:
        note(__name__, f"{len(failed)} copies have failed")
        names = {worker._load_jobs[job] for job in failed if job in worker._load_jobs}
        setattr(worker, _REQUESTS, getattr(worker, _REQUESTS, set()) | names)
        meta = worker._connector_worker_meta
        setattr(meta, _JOBS, getattr(meta, _JOBS, set()) | failed)
    return [View(each, success=True) for each in done] if failed else done


@fix_before(when=lambda worker, metadata: not hasattr(worker, _TOLD) and hasattr(metadata, _TOLD))
def start_kv_transfers(worker: Any, metadata: Any) -> None:
    setattr(worker, _TOLD, True)


def shows_bug(hook: Any, module: Any) -> bool:
    """Let the copy of a load fail. The bug raises AssertionError."""
    result = stubs.Stub(job_id=7, success=False, transfer_size=None, transfer_time=None)
    worker = stubs.Stub(
        worker=stubs.Stub(get_finished=lambda: [result]), _load_jobs={7: stubs.NAME},
        _connector_worker_meta=module.OffloadingWorkerMetadata(),
    )  # fmt: skip
    return stubs.raises(AssertionError, hook, worker, set())


FIX = Fix(
    api.OFFLOADING_WORKER.get_finished(broken=">=0.32", probe=shows_bug, fix=get_finished, helper=True),
    api.CONNECTOR_BASE.get_transfer_results(broken=">=0.32", fix=get_transfer_results, helper=True),
    api.OFFLOADING_WORKER_METADATA.aggregate(broken=">=0.32", fix=aggregate, helper=True),
    api.OFFLOADING_SCHEDULER.build_connector_meta(broken=">=0.32", fix=tells_worker, order=5, helper=True),
    api.OFFLOADING_WORKER.start_kv_transfers(broken=">=0.32", fix=start_kv_transfers, helper=True),
    # 0.26.0 has the bug too, but has no get_transfer_results, and its update_connector_output differs from 0.32.
    api.OFFLOADING_SCHEDULER.update_connector_output(broken=">=0.32", fix=update_connector_output, order=5),
    effect="crash",
    evidence={"KVR011": "^(wait_for_save|get_finished): AssertionError", "KVD987": ""},
    scenarios=("offload-copy-fails",),
    no_patch={"vllm": "vLLM PR 52838 is open"},
)
