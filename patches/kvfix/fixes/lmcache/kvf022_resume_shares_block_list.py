"""Preempted requests return wrong text: LMCache's tracker and the worker append to the same list of blocks.

Symptom: Nothing is logged. After preemptions (`Preemptions:` in vLLM's statistics), the preempted requests return wrong
text. Other requests that begin with the same tokens also return wrong text, until the chunks are evicted.

Cause: For a resumed request `RequestTracker.update` keeps the list of new blocks that the scheduler passes (0.5.6
vllm_v1_adapter.py:245). The worker keeps the list too (vLLM 0.32.0 v1/worker/gpu_model_runner.py:1428). A single worker
runs in the scheduler's process by default (`uni`), so tracker and worker share one list object. In each later step
tracker and worker both append the new blocks to this list (:1422), which then has each new block twice.

LMCache calculates slots from this list. The slots then belong to wrong tokens, and LMCache stores the KV of the wrong
tokens under valid keys. If a step leaves the request out, the worker later fills its block table from the wrong list.

Fix: After `build_connector_meta`, before the worker runs, the fix gives the tracker of each resumed request a copy of
the list. kvfix does not wrap `update`, because with 256 requests the wrapper would take a sixth of each step's time.
- Releases: LMCache 0.3.10 to 0.5.6 with vLLM's model runner V1. vLLM 0.32 uses V2 for most models on a GPU. V2 copies
  the list, and handles a resumed request as a new one. The multi-process connectors copy the list too.
- Remove when: LMCache copies the list.
"""

import inspect

from kvfix.fixes.api import LMCACHE_V1, REQUEST_TRACKER, Any, Fix, fix_after, note, stubs


def _own_lists(impl: Any, answer: Any, *_: Any, **__: Any) -> Any:
    for tracker in impl._request_trackers.values():
        tracker.allocated_block_ids = list(tracker.allocated_block_ids)
    return answer


@fix_after(on_fault=_own_lists)
def fix(impl: Any, answer: Any, scheduler_output: Any) -> None:
    for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
        tracker = impl._request_trackers.get(name)
        if tracker is not None:
            note(__name__, f"request {name}: LMCache gets its own copy of the block list")
            tracker.allocated_block_ids = list(tracker.allocated_block_ids)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Resume a request. Then append a block in the worker. With the bug, the tracker's list also gets this block."""
    tracker, blocks = adapter.RequestTracker(stubs.NAME, 48, [0] * 16, [0]), [1, 2]
    since_0_3_11 = "all_token_ids" in inspect.signature(hook).parameters
    hook(tracker, [0] * 16, (blocks,), True, **({"all_token_ids": [0] * 48} if since_0_3_11 else {}))
    if tracker.allocated_block_ids != [1, 2]:
        raise ValueError(f"the probe expects [1, 2], got {tracker.allocated_block_ids!r}")
    blocks.append(3)
    return bool(tracker.allocated_block_ids != [1, 2])


def step_shows_bug(hook: Any, adapter: Any) -> bool:
    """Resume a request. With the bug, the tracker keeps the list object of the scheduler output."""
    blocks = [1, 2]
    specs = {stubs.NAME: adapter.LoadSpec(32, 32, can_load=False)}
    impl, tracker = stubs.scheduled(adapter, 48, tracked=32, computed=32, load_specs=specs)
    hook(impl, stubs.step(16, computed=32, blocks=blocks, resumed=True))
    if tracker.allocated_block_ids != blocks:
        raise ValueError(f"the probe expects {blocks!r}, got {tracker.allocated_block_ids!r}")
    return tracker.allocated_block_ids is blocks


FIX = Fix(
    REQUEST_TRACKER.update(broken=">=0.3.10", probe=shows_bug, fix=None),
    LMCACHE_V1.build_connector_meta(broken=">=0.3.10", probe=step_shows_bug, fix=fix, order=8, helper=True),
    effect="wrong output",
    scenarios=("resume-shares-block-list", "resume-then-sits-out"),
)
