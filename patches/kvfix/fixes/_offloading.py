"""Handle failed copies and the reports of failures, for the fixes of vLLM's offloading connectors."""

from collections.abc import Callable, Collection

from kvfix.fixes.api import GO_ON, Any, Fixing, Steps, View, engine_log, fix_after, fix_around, replaced


def all_stores_fail(scheduler: Any, *_: Any, **__: Any) -> Any:
    """End all stores in flight as failed. kvfix calls this function if a fix of `update_connector_output` raises."""
    manager = scheduler.manager
    failed = [job.keys for job in scheduler._jobs.values() if job.is_store]

    def complete_store(keys: Any, context: Any, success: bool = True) -> None:
        manager.complete_store(keys, context, success=success and not any(keys is each for each in failed))

    scheduler.manager = View(manager, complete_store=complete_store)
    for status in scheduler._req_status.values():
        for group in status.group_states if status.req.is_finished() else ():
            group.block_ids.clear()  # the ended request then stores nothing more
    return GO_ON


def fails_jobs(mark: str, find: Callable[[Any, Any], Collection[int]]) -> Fixing:
    """Return a fix for `update_connector_output`. The fix ends a job (a copy) as failed if a worker reports a failure.

    After a failed store, the manager drops the store's chunks. If the store's request still runs, the scheduler stores
    all chunks of this request again. After a failed load, the request loads nothing more.
    mark: name of the scheduler's attribute that keeps a failed job until every worker has reported the job as done.
    find: takes the scheduler and a report of the workers, and returns the numbers of newly failed jobs.
    """

    @fix_around(on_fault=all_stores_fail)
    def update_connector_output(scheduler: Any, output: Any) -> Steps:
        failed = find(scheduler, output)
        if not failed and not getattr(scheduler, mark, None):  # true in almost all steps
            return (yield)
        known = vars(scheduler).setdefault(mark, set())
        known.update(failed)
        known.intersection_update(scheduler._jobs)  # a reset may have dropped some jobs
        completed = getattr(output.kv_connector_worker_meta, "completed_jobs", {})
        stores = {}
        for number in known.intersection(completed):
            job = scheduler._jobs[number]
            if job.is_store:
                stores[number] = job.keys, scheduler._req_status[job.req_id]
            else:
                scheduler._req_status[job.req_id].max_load_tokens = 0
        manager = scheduler.manager

        def complete_store(keys: Any, context: Any, success: bool = True) -> None:
            kept = engine_log.guarded(__name__, lambda: not any(keys is each for each, _ in stores.values()))
            manager.complete_store(keys, context, success=success and bool(kept))

        with replaced(scheduler, manager=View(manager, complete_store=complete_store)):
            yield
        size = scheduler.config.blocks_per_chunk
        for number, (_, request) in stores.items():
            for place, group in enumerate(request.group_states) if number not in scheduler._jobs else ():
                if place in scheduler._sliding_window_groups:  # the first `before` blocks may have left the window
                    before = group.next_stored_chunk_idx * size
                    group.block_ids[:before] = [0] * len(group.block_ids[:before])
                group.next_stored_chunk_idx = 0

    return update_connector_output


def tells_worker(mark: str) -> Fixing:
    """Return a fix that sets `mark` in the metadata. `mark` tells workers that the scheduler handles failed copies."""

    @fix_after()
    def build_connector_meta(scheduler: Any, metadata: Any, *_: Any, **__: Any) -> None:
        setattr(metadata, mark, True)  # vLLM sends the metadata with this attribute to the workers

    return build_connector_meta


def all_failed(mark: str, completed: str) -> Callable[..., Any]:
    """Return a function for `on_fault`. The function marks all done jobs of a worker's report as failed.

    mark: name of the report's attribute with the failed jobs. completed: name of the attribute with the done jobs.
    """

    def all_failed(instance: Any, report: Any, *_: Any, **__: Any) -> Any:
        if report is not None:
            setattr(report, mark, set(getattr(report, completed)))
        return report

    return all_failed


def combines_reports(mark: str, completed: str) -> Fixing:
    """Return a fix that combines the ranks' reports. A job fails if any rank fails. Arguments: as in `all_failed`."""

    @fix_after(
        when=lambda meta, answer, other, *_, **__: hasattr(meta, mark) or hasattr(other, mark),
        on_fault=all_failed(mark, completed),
    )
    def aggregate(meta: Any, answer: Any, other: Any) -> None:
        setattr(answer, mark, getattr(meta, mark, set()) | getattr(other, mark, set()))

    return aggregate


def all_loads_fail(connector: Any, answer: Any, *_: Any, **__: Any) -> Any:
    """Report every finished load as failed. kvfix calls this function if a fix of `get_transfer_results` raises."""
    answer.failed_recving.update(answer.finished_recving or ())
    return answer


def reports_failed_loads(side: str, requests: str) -> Fixing:
    """Return a fix for `get_transfer_results` of vLLM's base class. The fix reports the requests with a failed load.

    side: the connector's attribute that holds the worker. requests: the worker's attribute that holds failed requests.
    """

    @fix_after(
        only=lambda connector: hasattr(connector, side),
        when=lambda connector, *_, **__: hasattr(getattr(connector, side), requests),
        on_fault=all_loads_fail,
    )
    def get_transfer_results(connector: Any, answer: Any, *_: Any) -> None:
        failed = vars(getattr(connector, side)).pop(requests)
        answer.failed_recving.update(failed & answer.finished_recving)

    return get_transfer_results
