"""EngineCore dies if a load of KV fails for a model with several KV groups: vLLM cannot tell which request failed.

Symptom: EngineCore dies with `A KV connector reported block-level load failures (invalid_block_ids) which is not
supported for models with multiple KV cache groups`, or before vLLM 0.32 with `too many values to unpack (expected 1)`.
The bug needs all of these conditions:

- a model with layers of full attention and of sliding windows (Gemma, gpt-oss)
- LMCache's multi-process connector up to 0.5.5
- a server that is not reachable or has lost a chunk

Cause: The connector reports the blocks whose load has failed. With several KV groups vLLM needs the ids of the failed
requests (`failed_recving`), because blocks of different groups may have the same id (scheduler.py 0.32.0:3365). Earlier
releases assume that a request has one list of blocks (0.26.0:2694). Since 0.5.6, LMCache reports the failed requests.

Fix: The fix acts only with several KV groups and a connector of LMCache. If all requests with a failed block are
waiting for their loads, the fix treats each of these requests as a request with a failed load. With LMCache, all KV
groups take blocks from one pool, so a block id belongs to one group only. Null block 0 belongs to no request.
- Releases: vLLM 0.20.2 to 0.33.0, with LMCache's multi-process connector up to 0.5.5.
- Upstream: https://github.com/vllm-project/vllm/issues/50687; fixed in LMCache 0.5.6.
- Remove when: LMCache 0.5.5 is no longer in use.
"""

from kvfix.fixes import _scheduler
from kvfix.fixes.api import SCHEDULER, Any, Fix, Steps, fix_around, stubs


@fix_around(when=lambda scheduler, *_, **__: len(scheduler.kv_cache_config.kv_cache_groups) > 1)
def _handle_invalid_blocks(scheduler: Any, invalid_block_ids: Any, *_: Any) -> Steps:
    if not any(type(each).__name__.startswith("LMCache") for each in _scheduler.connectors(scheduler)):
        return (yield)
    failed, blocks = [], set(invalid_block_ids) - {0}
    for request in scheduler.requests.values():
        groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if not request.is_finished() and any(not blocks.isdisjoint(group) for group in groups):
            failed.append(request)
    if any(request.status.name != "WAITING_FOR_REMOTE_KVS" for request in failed):
        return (yield)
    names = {request.request_id for request in failed}
    if not scheduler.recompute_kv_load_failures:
        return names
    for request in failed:
        request.num_computed_tokens = 0
    scheduler.failed_recving_kv_req_ids |= names
    return set()


def shows_bug(hook: Any, module: Any) -> bool:
    """Report a failed block in the second of two KV groups. The bug raises RuntimeError or ValueError."""
    request = stubs.request(32, is_finished=lambda: False, status=module.RequestStatus.WAITING_FOR_REMOTE_KVS)
    scheduler = _scheduler.running(request)
    scheduler.connector = type("LMCacheMPConnector", (), {})()
    scheduler.kv_cache_config = stubs.Stub(kv_cache_groups=[None, None])
    scheduler.kv_cache_manager.get_block_ids = lambda name: ([3, 4], [0, 5])
    scheduler.running, scheduler.skipped_waiting, scheduler.kv_holding_waiting = [], [request], [request]
    scheduler._update_requests_with_invalid_blocks = lambda *more, **_: (
        module.Scheduler._update_requests_with_invalid_blocks(scheduler, *more)
    )
    tokens = _scheduler.scheduled_tokens(hook, scheduler)
    return stubs.raises((RuntimeError, ValueError), hook, scheduler, {0, 5}, *tokens)


FIX = Fix(
    SCHEDULER._handle_invalid_blocks(broken=">=0.20.2", probe=shows_bug, fix=_handle_invalid_blocks),
    effect="crash",
    evidence={"KVR011": r"block-level load failures|too many values to unpack"},
    scenarios=("mp-failed-load-of-groups",),
    no_patch={"vllm": "since 0.5.6, LMCache reports the ids of failed requests, as vLLM requires"},
)
