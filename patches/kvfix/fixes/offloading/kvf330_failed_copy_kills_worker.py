"""EngineCore dies when OffloadingConnector fails to copy blocks: the worker asserts that every copy succeeds.

## Symptom
The worker dies with a bare `AssertionError` at `assert transfer_result.success` in `get_finished` of
offloading/worker.py, and EngineCore dies with it. vLLM's own copy between GPU and CPU memory raises an exception if it
fails, and does not trigger this bug. Other workers (`spec_module_path`), such as llm-d's worker for a file system,
report the failure and trigger it.

## Cause
`get_finished` asserts that each copy has succeeded: "we currently do not support job failures" (offloading/worker.py
0.32.0:288). The code to handle a failed copy exists. The manager drops the chunks of a store that is completed as
failed. If the worker reports a failed load, vLLM computes the tokens, or ends the request (`kv_load_failure_policy`).

## Fix
The fix shows all copies to `get_finished` as successful. The worker's report names the copies that failed. The
scheduler completes a failed store as failed, and vLLM gets the report of a failed load. The request of a failed load
loads nothing more. Otherwise vLLM would retry an unreadable chunk for ever.

## Releases
vLLM 0.26.0 to 0.33.0. The fix is for 0.32.0 and later, because earlier releases cannot report a failed load by request.

## Upstream
https://github.com/vllm-project/vllm/issues/39732, https://github.com/vllm-project/vllm/pull/52838 (open).

## Remove when
`get_finished` of offloading/worker.py handles a result without success.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix import engine_log
from kvfix.acting import note
from kvfix.fixes import _offloading, stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import (
    CONNECTOR_BASE,
    OFFLOADING_SCHEDULER,
    OFFLOADING_WORKER,
    OFFLOADING_WORKER_METADATA,
)
from kvfix.wrapping import View, after, around, before, replaced

#: Of the worker: requests whose load has failed. Of its report, and of the scheduler: jobs that have.
_REQUESTS, _JOBS = "_kvfix_failed_requests", "_kvfix_failed_jobs"
#: Of the metadata and of the worker: the scheduler has its part of the fix.
_TOLD = "_kvfix_knows_failed_copies"

tells_worker = _offloading.tells_worker(_TOLD)
fix_results = _offloading.reports_failed_loads("connector_worker", _REQUESTS)


def fix(module: ModuleType) -> Callable[..., Any]:
    def get_finished(worker: Any, finished_req_ids: Any) -> Generator[None, Any, Any]:
        own = worker.worker

        def finished() -> Any:
            done = own.get_finished()
            # If the failed copies cannot be noted, they are handed on as they are, and vLLM asserts, as released.
            noted = engine_log.guarded(f"{__name__}.get_finished", _note_failed, worker, done)
            return done if noted is None else noted

        with replaced(worker, worker=View(own, get_finished=finished)):
            return (yield)

    return around(get_finished, when=lambda worker, *_, **__: getattr(worker, _TOLD, False))


def _note_failed(worker: Any, done: Any) -> Any:
    """Record the failed copies for the scheduler, and return all copies as done."""
    failed = {each.job_id for each in done if not each.success}
    if failed:
        note(__name__, f"{len(failed)} copies have failed")
        names = {worker._load_jobs[job] for job in failed if job in worker._load_jobs}
        setattr(worker, _REQUESTS, getattr(worker, _REQUESTS, set()) | names)
        meta = worker._connector_worker_meta
        setattr(meta, _JOBS, getattr(meta, _JOBS, set()) | failed)
    return [View(each, success=True) for each in done] if failed else done


def is_told(module: ModuleType) -> Callable[..., Any]:
    def start_kv_transfers(worker: Any, metadata: Any) -> None:
        setattr(worker, _TOLD, True)

    return before(
        start_kv_transfers,
        when=lambda worker, metadata: not hasattr(worker, _TOLD) and hasattr(metadata, _TOLD),
    )


def fix_aggregate(module: ModuleType) -> Callable[..., Any]:
    """Combine the reports of several ranks. A job has failed if one rank reports it as failed."""

    def aggregate(meta: Any, answer: Any, other: Any) -> Any:
        setattr(answer, _JOBS, getattr(meta, _JOBS, set()) | getattr(other, _JOBS, set()))
        return answer

    def all_failed(meta: Any, answer: Any, other: Any) -> Any:
        setattr(answer, _JOBS, set(answer.completed_jobs))
        return answer

    return after(
        aggregate,
        when=lambda meta, answer, other, *_, **__: hasattr(meta, _JOBS) or hasattr(other, _JOBS),
        on_fault=all_failed,
    )


def fix_scheduler(module: ModuleType) -> Callable[..., Any]:
    def update_connector_output(scheduler: Any, output: Any) -> Generator[None, Any, Any]:
        failed = vars(scheduler).setdefault(_JOBS, set())
        failed.update(getattr(output.kv_connector_worker_meta, _JOBS, ()))
        failed.intersection_update(scheduler._jobs)  # a reset has dropped the others
        done = failed.intersection(_offloading.completed(output))
        stores = [job for job in done if scheduler._jobs[job].is_store]
        for job in done.difference(stores):
            scheduler._req_status[scheduler._jobs[job].req_id].max_load_tokens = 0
        with _offloading.completed_as_failed(scheduler, stores):
            return (yield)

    # In almost all steps there is neither.
    return around(
        update_connector_output,
        when=lambda scheduler, output, *_, **__: (
            getattr(scheduler, _JOBS, None) or hasattr(output.kv_connector_worker_meta, _JOBS)
        ),
        on_fault=_offloading.all_stores_fail,
    )


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """The copy of a load has failed. Wrong is an AssertionError."""
    result = SimpleNamespace(job_id=7, success=False, transfer_size=None, transfer_time=None)
    worker = SimpleNamespace(
        worker=SimpleNamespace(get_finished=lambda: [result]), _load_jobs={7: stubs.NAME},
        _connector_worker_meta=module.OffloadingWorkerMetadata(),
    )  # fmt: skip
    return stubs.raises(AssertionError, hook, worker, set())


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(
        OFFLOADING_WORKER.get_finished(broken=">=0.32", probe=shows_bug, fix=fix, helper=True),
        CONNECTOR_BASE.get_transfer_results(broken=">=0.32", probe=stubs.cannot_tell, fix=fix_results, helper=True),
        OFFLOADING_WORKER_METADATA.aggregate(broken=">=0.32", probe=stubs.cannot_tell, fix=fix_aggregate, helper=True),
        OFFLOADING_SCHEDULER.build_connector_meta(
            broken=">=0.32", probe=stubs.cannot_tell, fix=tells_worker, place=5, helper=True
        ),
        OFFLOADING_WORKER.start_kv_transfers(broken=">=0.32", probe=stubs.cannot_tell, fix=is_told, helper=True),
        # get_finished is wrong in 0.26.0 too, where there is no get_transfer_results: this is what differs.
        OFFLOADING_SCHEDULER.update_connector_output(
            broken=">=0.32", probe=stubs.cannot_tell, fix=fix_scheduler, place=5
        ),
    ),
    evidence={"KVR011": "^(wait_for_save|get_finished): AssertionError", "KVD987": ""},
    scenarios=("offload-copy-fails",),
    on_fault="closed",
    no_patch={"vllm": "vLLM PR 52838 is open"},
)
