"""Later requests return wrong text: blocks whose load failed stay in vLLM's prefix cache.

Symptom: The log has `Recovered from KV load failure: ... request(s) rescheduled (... tokens affected).`

Cause: With kv_load_failure_policy "recompute" vLLM keeps failed blocks in the prefix cache, because the request soon
computes the blocks (scheduler.py 0.32.0:3412). If the request is aborted or preempted first, the blocks stay wrong.
With either policy, another request may share a failed block, and compute KV from this block in the same step. vLLM
caches this KV. If a request is aborted or preempted before the worker reports the failure, vLLM misses the
request's failed blocks.

Fix: With either policy, the fix evicts failed blocks from the prefix cache. If a request has a failed block, the fix
also evicts all later blocks of this request. The requests keep the blocks, but other requests cannot find the blocks.
If a request of the failed step no longer runs, the fix does not know the request's blocks, and evicts all free blocks.
- Upstream: None known; https://github.com/vllm-project/vllm/pull/26813 decided that failed blocks stay cached.
- Remove when: `_handle_invalid_blocks` evicts the failed blocks, or caches a block only after its computation.
"""

import functools
import inspect

from kvfix.fixes import _closed, _scheduler
from kvfix.fixes.api import SCHEDULER, Any, Fix, fix_after, note, stubs


@fix_after(on_fault=_closed.forget_cached)
def evict_failed(scheduler: Any, answer: Any, requests: Any, invalid_block_ids: Any, *more: Any) -> None:
    for _, first, own in _scheduler.failed(scheduler, answer[0], invalid_block_ids, *more):
        note(__name__, f"evicted {len(own) - first} blocks of a request with a failed load from the prefix cache")
        _evict(scheduler.kv_cache_manager, set(own[first:]))
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    cached = [blocks[block] for block in invalid_block_ids if blocks[block].block_hash]
    if cached and (not all(block.ref_cnt for block in cached) or _is_a_request_gone(requests, *more)):
        note(__name__, "evicted all free blocks from the prefix cache after a failed load")
        _evict(scheduler.kv_cache_manager, {block.block_id for block in blocks if not block.ref_cnt})


def _is_a_request_gone(running: Any, scheduled: Any = (), *_: Any) -> bool:
    """Return True if a scheduled request no longer runs. Without `scheduled` (vLLM up to 0.15), return False."""
    return isinstance(scheduled, dict) and not scheduled.keys() <= {request.request_id for request in running}


def _evict(manager: Any, blocks: set[int]) -> None:
    if hasattr(manager, "evict_blocks"):
        manager.evict_blocks(blocks)
    else:  # vLLM 0.11
        for block in blocks:
            manager.block_pool._maybe_evict_cached_block(manager.block_pool.blocks[block])


def shows_bug(hook: Any, scheduler: Any) -> bool:
    """Let one block of a running request fail. With the bug, vLLM does not evict the block."""
    stub = _scheduler.running(stubs.request(32, num_computed_tokens=20, num_cached_tokens=16))
    stub._update_requests_with_invalid_blocks = functools.partial(hook, stub)
    calls = inspect.unwrap(scheduler.Scheduler._handle_invalid_blocks)
    calls(stub, {3}, *_scheduler.scheduled_tokens(calls, stub))
    return not stub.kv_cache_manager.evict_blocks


FIX = Fix(
    SCHEDULER._update_requests_with_invalid_blocks(broken=">=0.11.2", probe=shows_bug, fix=evict_failed, order=2),
    effect="wrong output",
    evidence={"KVD302": "", "KVD303": "", "KVD1090": ""},
    scenarios=("failed-load-gone-under-way", "failed-load-stays-cached"),
)
