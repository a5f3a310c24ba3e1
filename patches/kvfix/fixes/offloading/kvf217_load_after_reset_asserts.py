"""EngineCore dies after a prefix cache reset: OffloadingConnector mistakes a load for a store.

Symptom: EngineCore dies with a bare `AssertionError` at `assert self._jobs[any_jid].is_store` in `build_connector_meta`
of offloading/scheduler.py, after `reset_prefix_cache` with `reset_running_requests` and without `reset_connector`.

Cause: When a request is preempted, OffloadingConnector waits for the request's copies, and asserts that all copies are
stores (offloading/scheduler.py 0.32.0:1862). vLLM does not admit a request in the step in which vLLM preempts
the request. But if a reset preempts a request between two steps, the next step can start a load for the request.

Fix: If a preempted request has a load in flight, the fix hides the request from `build_connector_meta`. The request has
no stores to wait for, because vLLM starts a load only when the request's stores are done.
"""

from kvfix.fixes.api import OFFLOADING_SCHEDULER, Any, Fix, Steps, View, fix_around, stubs


@fix_around(when=lambda scheduler, output, *_, **__: output.preempted_req_ids and scheduler._current_batch_load_jobs)
def hide_loading(scheduler: Any, scheduler_output: Any) -> Steps:
    preempted = scheduler_output.preempted_req_ids
    loading = {scheduler._jobs[job].req_id for job in scheduler._current_batch_load_jobs}.intersection(preempted)
    return (yield (View(scheduler_output, preempted_req_ids=preempted - loading),) if loading else None)


def shows_bug(hook: Any, module: Any) -> bool:
    """Preempt a request that has a load in flight. The bug raises AssertionError."""
    nothing = stubs.Calls({})
    scheduler = stubs.Stub(
        _jobs={7: stubs.Stub(req_id=stubs.NAME, is_store=False)},
        _req_status={stubs.NAME: stubs.Stub(transfer_jobs={7})}, _current_batch_load_jobs={7: None},
        _current_batch_jobs_to_flush=set(), _current_batch_allocated_block_ids=set(), _block_id_to_pending_jobs={},
        _update_req_states=nothing, _build_partial_tail_store_jobs=nothing, _build_store_jobs=nothing,
        manager=stubs.Stub(on_schedule_end=nothing),
    )  # fmt: skip
    step = stubs.step()
    step.preempted_req_ids.add(stubs.NAME)
    return stubs.raises(AssertionError, hook, scheduler, step)


FIX = Fix(
    OFFLOADING_SCHEDULER.build_connector_meta(broken=">=0.26.0,<0.33", probe=shows_bug, fix=hide_loading),
    effect="crash",
    evidence={"KVR011": r"^(schedule|build_connector_meta): AssertionError$"},
    no_patch={"vllm": "fixed in 0.33.0"},
)
