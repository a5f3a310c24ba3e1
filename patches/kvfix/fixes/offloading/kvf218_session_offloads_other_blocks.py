"""Later requests return wrong text: OffloadingConnector stores wrong blocks of a streaming session.

Symptom: Nothing is logged at first. When a session ends, a `KeyError` in `_remove_pending_job` may end EngineCore
(offloading/scheduler.py). The bug needs OffloadingConnector (also in MultiConnector) and streaming input.

Cause: When a session gets more input, vLLM schedules the session as a new request, with all its blocks. The connector
appends all blocks to a list that already has the earlier blocks (offloading/scheduler.py 0.32.0:1302).

Fix: When a request is scheduled as new, the fix drops the blocks that OffloadingConnector has recorded for the request.
"""

from kvfix.fixes.api import GO_ON, OFFLOADING_SCHEDULER, Any, Fix, fix_before, note, stubs


def forget_blocks(scheduler: Any, scheduler_output: Any, *_: Any, **__: Any) -> Any:
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id in scheduler._req_status:
            for group in scheduler._req_status[new.req_id].group_states:
                group.block_ids = []
    return GO_ON


@fix_before(when=lambda scheduler, output, *_, **__: output.scheduled_new_reqs, on_fault=forget_blocks)
def drop_old_blocks(scheduler: Any, scheduler_output: Any) -> None:
    for new in scheduler_output.scheduled_new_reqs:
        for group in scheduler._req_status[new.req_id].group_states:
            if group.block_ids:
                note(__name__, f"request {new.req_id} is scheduled as new again: its old blocks are dropped")
            group.block_ids.clear()


def shows_bug(hook: Any, module: Any) -> bool:
    """Schedule a session that has blocks 3 and 4 as a new request with blocks 3 to 5. The bug lists five blocks."""
    blocks = [3, 4]
    request = stubs.Stub(group_states=(stubs.Stub(block_ids=blocks),), update_offload_keys=lambda: None)
    request.update_block_id_groups = lambda groups: blocks.extend(groups[0])
    scheduler = stubs.Stub(
        _req_status={stubs.NAME: request}, _sliding_window_groups=(), _current_batch_allocated_block_ids=set(),
        config=stubs.Stub(kv_group_configs=()),
    )  # fmt: skip
    output = stubs.step(1, new=stubs.Stub(req_id=stubs.NAME, block_ids=([3, 4, 5],)))
    output.kv_cache_block_copies = None
    hook(scheduler, output)
    return len(blocks) > 3


FIX = Fix(
    OFFLOADING_SCHEDULER._update_req_states(broken=">=0.26.0,<0.33", probe=shows_bug, fix=drop_old_blocks),
    effect="wrong output",
    evidence={"KVR011": "^update_from_output: KeyError: "},
    no_patch={"vllm": "fixed in 0.33.0"},
)
