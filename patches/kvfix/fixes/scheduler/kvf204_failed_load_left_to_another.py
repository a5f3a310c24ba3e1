"""A request returns wrong text: it shares blocks whose load failed, and vLLM counts them as computed.

Symptom: Only `Recovered from KV load failure: ... request(s) rescheduled (... tokens affected).` is logged. The
request with wrong text began in the same step as a request whose load failed. Both requests have the same prompt.

Cause: When a connector loads within the step, vLLM puts the blocks into its prefix cache before the load is done. So
other requests of this step can share the blocks. If the load fails, vLLM rolls back only the first request that has the
failed block. vLLM counts all tokens of the other requests as computed (scheduler.py 0.32.0:3297). These requests read
blocks without KV if the first request is aborted or preempted, or computes the blocks in several steps.

Fix: The fix rolls back each request to its own first failed block. All requests write the same KV to a shared block.
- Releases: vLLM 0.11.2 to 0.33.0, with kv_load_failure_policy "recompute".
- Upstream: https://github.com/vllm-project/vllm/pull/37827 (closed) for asynchronous loads. In
  https://github.com/vllm-project/vllm/pull/26813 vLLM decided not to roll back the other requests.
- Remove when: `_update_requests_with_invalid_blocks` rolls back every request.
"""

from kvfix.fixes import _scheduler
from kvfix.fixes.api import SCHEDULER, Any, Fix, fix_after, note, stubs


def from_the_start(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    for name in answer[0]:
        scheduler.requests[name].num_computed_tokens = 0
    return answer


@fix_after(on_fault=from_the_start)
def roll_back_all(scheduler: Any, answer: Any, requests: Any, invalid_block_ids: Any, *more: Any) -> None:
    for name, first, _ in _scheduler.failed(scheduler, answer[0], invalid_block_ids, *more):
        request = scheduler.requests[name]
        if request.num_computed_tokens > first * scheduler.block_size:
            note(__name__, f"request {name} is rolled back to {first * scheduler.block_size} tokens")
            request.num_computed_tokens = first * scheduler.block_size


def shows_bug(hook: Any, scheduler: Any) -> bool:
    """Let two requests share a failed block. With the bug, vLLM rolls back only one request."""
    both = [stubs.request(32, request_id=name, num_computed_tokens=20, num_cached_tokens=16) for name in "ab"]
    _scheduler.roll_back(hook, *both)
    return any(request.num_computed_tokens for request in both)


FIX = Fix(
    SCHEDULER._update_requests_with_invalid_blocks(broken=">=0.11.2", probe=shows_bug, fix=roll_back_all, order=3),
    effect="wrong output",
)
