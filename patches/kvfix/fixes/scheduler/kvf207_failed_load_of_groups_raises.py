"""EngineCore dies at a failed load of a model with several KV groups: vLLM cannot tell which request has failed.

## Symptom
EngineCore dies with `A KV connector reported block-level load failures (invalid_block_ids) which is not supported for
models with multiple KV cache groups`, or before vLLM 0.32 with `too many values to unpack (expected 1)`. This needs all
of:

- a model with layers of full attention and of sliding windows (Gemma, gpt-oss)
- LMCache's multi-process connector up to 0.5.5
- a server that is not reachable or has lost a chunk

## Cause
The connector reports the blocks whose load has failed. With several KV groups vLLM needs the ids of the failed requests
(`failed_recving`), because blocks of different groups may have the same id (scheduler.py 0.32.0:3364). Earlier releases
assume that a request has one list of blocks (0.26.0:2694). Since 0.5.6, LMCache reports the failed requests.

## Fix
The fix acts only for a model with several groups and a connector of LMCache. If all requests with a failed block are
waiting for their load, the fix handles the failure in place of vLLM's function. The requests then compute their prompt
again. With kv_load_failure_policy "fail" they end instead. The result is the same as if the connector had reported the
requests by their ids. LMCache's groups take their blocks from one pool, so an id belongs to one group only. Null block
0 belongs to no request.

## Releases
vLLM 0.20.2 to 0.32.0.

## Upstream
https://github.com/vllm-project/vllm/issues/50687; fixed in LMCache 0.5.6.

## Remove when
LMCache 0.5.5 is no longer in use.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import _scheduler, stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SCHEDULER
from kvfix.wrapping import around, instead


def fix(module: ModuleType) -> Callable[..., Any]:
    loading = module.RequestStatus.WAITING_FOR_REMOTE_KVS

    def _handle_invalid_blocks(scheduler: Any, invalid_block_ids: Any, *_: Any) -> Generator[None, Any, Any] | None:
        failed, blocks = [], set(invalid_block_ids) - {0}
        for request in scheduler.requests.values():
            groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            if not request.is_finished() and any(not blocks.isdisjoint(group) for group in groups):
                failed.append(request)
        if any(request.status != loading for request in failed):
            return None
        names = {request.request_id for request in failed}
        if not scheduler.recompute_kv_load_failures:
            return instead(names)
        for request in failed:
            request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids |= names
        return instead(set())

    return around(
        _handle_invalid_blocks,
        when=lambda scheduler, *_, **__: len(scheduler.kv_cache_config.kv_cache_groups) > 1 and _of_lmcache(scheduler),
    )


def _of_lmcache(scheduler: Any) -> bool:
    return any(type(each).__name__.startswith("LMCache") for each in _scheduler.connectors(scheduler))


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A request with two groups loads, and a block of the second has failed. Wrong is to raise."""
    request = stubs.request(32, is_finished=lambda: False, status=module.RequestStatus.WAITING_FOR_REMOTE_KVS)
    scheduler = _scheduler.running(request)
    scheduler.connector = type("LMCacheMPConnector", (), {})()
    scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])
    scheduler.kv_cache_manager.get_block_ids = lambda name: ([3, 4], [0, 5])
    scheduler.running, scheduler.skipped_waiting, scheduler.kv_holding_waiting = [], [request], [request]
    scheduler._update_requests_with_invalid_blocks = lambda *more, **_: (
        module.Scheduler._update_requests_with_invalid_blocks(scheduler, *more)
    )
    return stubs.raises(
        (RuntimeError, ValueError), hook, scheduler, {0, 5}, *_scheduler.scheduled_tokens(hook, scheduler)
    )


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(SCHEDULER._handle_invalid_blocks(broken=">=0.20.2", probe=shows_bug, fix=fix),),
    evidence={"KVR011": r"block-level load failures|too many values to unpack"},
    scenarios=("mp-failed-load-of-groups",),
    no_patch={"vllm": "LMCache reports failed requests since 0.5.6, as vLLM asks of a connector"},
)
