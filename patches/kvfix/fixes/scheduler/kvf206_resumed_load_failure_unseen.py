"""A preempted request returns wrong text: vLLM does not see that the load failed when the request resumed.

Symptom: Only LMCache's `Request ... failed to load ... tokens across ... blocks` is logged. A request that was
preempted returns wrong text, also with kv_load_failure_policy "fail".

Cause: vLLM looks for failed blocks only in the first `num_cached_tokens` tokens of each running request (scheduler.py
0.15.1:2007). vLLM sets this number when it first schedules a request. A resumed request loads tokens past this number.

Fix: In `_update_requests_with_invalid_blocks`, the fix raises `num_cached_tokens` to the end of the last failed block.
- Upstream: None known. vLLM 0.20.2 no longer has the bug, and counts from `num_computed_tokens`.
"""

from kvfix.fixes import _scheduler
from kvfix.fixes.api import GO_ON, SCHEDULER, Any, Fix, Steps, fix_around, note, stubs


def _all_cached(scheduler: Any, *_: Any, **__: Any) -> Any:
    """Let vLLM look at all computed tokens of each request."""
    for request in scheduler.running:
        request.num_cached_tokens = request.num_computed_tokens
    return GO_ON


# The fix is only for loads within a step, because vLLM checks loads between steps in another way.
@fix_around(when=lambda scheduler, requests, blocks, *more: _scheduler.is_within_step(*more), on_fault=_all_cached)
def look_further(scheduler: Any, requests: Any, invalid_block_ids: Any, *_: Any) -> Steps:
    before = [(request, request.num_cached_tokens) for request in requests]
    try:
        for request, cached in before:
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            failed = [place for place, block in enumerate(blocks) if block in invalid_block_ids]
            if failed:
                note(__name__, f"request {request.request_id}: {len(failed)} failed blocks")
                request.num_cached_tokens = max(cached, (failed[-1] + 1) * scheduler.block_size)
        return (yield)
    finally:
        for request, cached in before:
            request.num_cached_tokens = cached


def shows_bug(hook: Any, scheduler: Any) -> bool:
    """Let the load of a block fail when a request resumes. With the bug, vLLM does not see the failure."""
    affected, *_ = _scheduler.roll_back(hook, stubs.request(32, num_computed_tokens=20, num_cached_tokens=0))
    return not affected


FIX = Fix(
    SCHEDULER._update_requests_with_invalid_blocks(broken=">=0.11.2,<0.20", probe=shows_bug, fix=look_further, order=5),
    effect="wrong output",
)
