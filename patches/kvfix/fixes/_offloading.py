"""Code that the fixes of vLLM's connectors for CPU memory share. It handles failed copies and their reports."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix import engine_log
from kvfix.fixes import stubs
from kvfix.wrapping import GO_ON, View, after, replaced


@contextmanager
def completed_as_failed(scheduler: Any, jobs: Collection[int]) -> Iterator[None]:
    """While `update_connector_output` runs, let it complete these stores as failed.

    The manager then drops their chunks. Requests that still run offer all of their chunks again.
    """
    manager = scheduler.manager
    failed = [scheduler._jobs[job].keys for job in jobs]

    def complete_store(keys: Any, context: Any, success: bool = True) -> None:
        kept = engine_log.guarded(__name__, lambda: not any(keys is each for each in failed))
        manager.complete_store(keys, context, success=success and bool(kept))

    requests = [scheduler._req_status[scheduler._jobs[job].req_id] for job in jobs]
    with replaced(scheduler, manager=View(manager, complete_store=complete_store)):
        yield
    size = scheduler.config.blocks_per_chunk
    for job, request in zip(jobs, requests, strict=True):
        for number, group in enumerate(request.group_states) if job not in scheduler._jobs else ():
            if number in scheduler._sliding_window_groups:  # blocks before this index may have left the window
                before = group.next_stored_chunk_idx * size
                group.block_ids[:before] = [0] * len(group.block_ids[:before])
            group.next_stored_chunk_idx = 0


def all_stores_fail(scheduler: Any, *_: Any, **__: Any) -> Any:
    """For `on_fault` of `update_connector_output`: complete all stores in flight as failed."""
    manager = scheduler.manager
    failed = [job.keys for job in scheduler._jobs.values() if job.is_store]

    def complete_store(keys: Any, context: Any, success: bool = True) -> None:
        manager.complete_store(keys, context, success=success and not any(keys is each for each in failed))

    scheduler.manager = View(manager, complete_store=complete_store)
    for status in scheduler._req_status.values():
        for group in status.group_states if status.req.is_finished() else ():
            group.block_ids.clear()  # so that the request stores nothing more
    return GO_ON


def tells_worker(mark: str) -> Callable[[ModuleType], Callable[..., Any]]:
    """Mark the metadata. The mark tells the worker that the scheduler handles failed copies. Without the mark, the
    worker never reports failed copies as done.
    """

    def fix(module: ModuleType) -> Callable[..., Any]:
        def build_connector_meta(scheduler: Any, metadata: Any, *_: Any, **__: Any) -> Any:
            setattr(metadata, mark, True)  # the attributes of the metadata are sent to the workers
            return metadata

        return after(build_connector_meta)

    return fix


def reports_failed_loads(side: str, requests: str) -> Callable[[ModuleType], Callable[..., Any]]:
    """Report failed loads by request, in `get_transfer_results` of vLLM's base class.

    side: the connector's attribute with its worker. requests: the worker's attribute with the failed requests.
    """

    def fix(module: ModuleType) -> Callable[..., Any]:
        def get_transfer_results(connector: Any, answer: Any, *_: Any) -> Any:
            failed = vars(getattr(connector, side)).pop(requests)
            answer.failed_recving.update(failed & answer.finished_recving)
            return answer

        return after(
            get_transfer_results,
            when=lambda connector, *_, **__: getattr(getattr(connector, side, None), requests, None),
            on_fault=all_loads_fail,
        )

    return fix


def all_loads_fail(connector: Any, answer: Any, *_: Any, **__: Any) -> Any:
    """For `on_fault` of `get_transfer_results`: report all loads that have ended as failed."""
    answer.failed_recving.update(answer.finished_recving or ())
    return answer


def completed(output: Any) -> dict[int, int]:
    """Return {job: number of workers that have completed it} of this report."""
    jobs: dict[int, int] = getattr(output.kv_connector_worker_meta, "completed_jobs", {})
    return jobs


def success_of_store(hook: Callable[..., Any], module: ModuleType, **of_output: Any) -> list[bool]:
    """For probes: end a store of block 3, and return the `success` flags with which it is completed."""
    group = SimpleNamespace(block_ids=[3], next_stored_chunk_idx=1)
    request = SimpleNamespace(
        req=stubs.request(16, is_finished=lambda: False), group_states=(group,), transfer_jobs={7}, req_context=None,
        finished_signaled=False,
    )  # fmt: skip
    job = SimpleNamespace(
        req_id=stubs.NAME, pending_count=1, keys={b"key"}, is_store=True, fenced_block_ids=None,
        deferred_fence_block_ids=None,
    )  # fmt: skip
    found: list[bool] = []
    scheduler = SimpleNamespace(
        manager=SimpleNamespace(complete_store=lambda keys, context, success=True: found.append(success)),
        _jobs={7: job}, _req_status={stubs.NAME: request}, _block_id_to_pending_jobs={}, _stale_job_threshold=0,
        _reset_fence={}, _manager_locked=nullcontext, config=SimpleNamespace(blocks_per_chunk=1),
        _sliding_window_groups=(),
    )  # fmt: skip
    scheduler._update_connector_output = lambda output: module.OffloadingConnectorScheduler._update_connector_output(
        scheduler, output
    )
    meta = module.OffloadingWorkerMetadata()
    meta.mark_completed(7)
    vars(meta).update(of_output.pop("meta", {}))
    hook(scheduler, SimpleNamespace(kv_connector_worker_meta=meta, **{"invalid_block_ids": set(), **of_output}))
    return found
