"""Later requests return wrong text: OffloadingConnector stores an incomplete chunk of a sliding window.

Symptom: Nothing is logged. The bug needs sliding windows and multi-block chunks (`blocks_per_chunk` or `block_size`).

Cause: A request that begins with a hit has null blocks in front of its window. Even if the window begins within a
chunk, OffloadingConnector checks only the chunk's last block. OffloadingConnector then stores the blocks that are not
null, and counts the chunk as complete (offloading/scheduler.py 0.32.0:1670, 1780). The window of a later request may
begin earlier in the chunk. The later request then loads old content of CPU memory in place of the missing blocks.

Fix: If any block of a sliding-window chunk is null, the fix does not store this chunk.
- Remove when: `_build_store_jobs` checks all blocks of a chunk.
"""

from itertools import chain

from kvfix.fixes.api import OFFLOADING_SCHEDULER, Any, Fix, fix_before, note


# In each step, the fix checks the unstored chunks of running requests and all chunks of finished requests.
@fix_before(
    when=lambda scheduler, *_, **__: scheduler._sliding_window_groups and scheduler.config.blocks_per_chunk > 1,
    on_fault=lambda *_, **__: {},  # no stores in this step
)
def _build_store_jobs(scheduler: Any, scheduler_output: Any) -> None:
    size = scheduler.config.blocks_per_chunk
    for name in chain(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids or ()):
        status = scheduler._req_status.get(name)
        for number in scheduler._sliding_window_groups if status is not None else ():
            group = status.group_states[number]
            first = 0 if status.req.is_finished() else group.next_stored_chunk_idx
            for start in range(first * size, len(group.block_ids) - size + 1, size):
                if 0 in group.block_ids[start : start + size]:
                    if group.block_ids[start + size - 1]:
                        note(__name__, f"request {name}: chunk {start // size} is not stored")
                    group.block_ids[start + size - 1] = 0


FIX = Fix(
    OFFLOADING_SCHEDULER._build_store_jobs(broken=">=0.32", fix=_build_store_jobs),
    effect="wrong output",
    scenarios=("offload-window-chunk-stored-in-part",),
)
