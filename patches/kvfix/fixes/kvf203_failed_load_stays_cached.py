"""Blocks whose load failed stay in vLLM's prefix cache, and the next request reads them: wrong text, no error.

## Symptom
`Recovered from KV load failure: ... request(s) rescheduled (... tokens affected).` Later, wrong text in requests that
begin with the same prompt.

## Cause
With kv_load_failure_policy "recompute" vLLM leaves the blocks in the prefix cache, since the request is to compute them
again at once (scheduler.py 0.32.0:3412). If it is aborted or preempted before that, nobody does. And with either policy
what another request has computed in the same step, on top of blocks that it shares with the first, stays. And a request
that is aborted while its step runs, or preempted where the next step is under way, is not looked at any more.

## Fix
The failed blocks, and those after them of every request that has one, are taken out of the prefix cache with either
policy. The requests keep them; only others cannot find them. If one of the step is gone, which blocks it had after the
failed ones is not known: all that nobody has are taken out.

## Releases
vLLM 0.11.2 to 0.32.0.

## Upstream
None known; that they stay was decided in https://github.com/vllm-project/vllm/pull/26813.

## Remove when
`_handle_invalid_blocks` evicts them, or puts them back only once they are computed.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch
from kvfix.fixes import _scheduler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(scheduler: ModuleType) -> Callable[..., Any]:
    def _update_requests_with_invalid_blocks(
        scheduler: Any, answer: Any, requests: Any, invalid_block_ids: Any, *more: Any
    ) -> Any:
        for _, first, own in _scheduler.failed(scheduler, answer[0], invalid_block_ids, *more):
            _evict(scheduler.kv_cache_manager, set(own[first:]))
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        cached = [blocks[block] for block in invalid_block_ids if blocks[block].block_hash]
        if cached and (any(_is_nobodys(block) for block in cached) or _is_somebody_gone(requests, *more)):
            _evict(scheduler.kv_cache_manager, {block.block_id for block in blocks if _is_nobodys(block)})
        return answer

    return after(_update_requests_with_invalid_blocks)


def _is_nobodys(block: Any) -> bool:
    return not block.ref_cnt


def _is_somebody_gone(running: Any, scheduled: Any = (), *_: Any) -> bool:
    """Whether a request of the failed step, which may share its blocks, runs no more. To 0.15 vLLM does not tell."""
    return isinstance(scheduled, dict) and not scheduled.keys() <= {request.request_id for request in running}


def _evict(manager: Any, blocks: set[int]) -> None:
    if hasattr(manager, "evict_blocks"):
        manager.evict_blocks(blocks)
    else:  # 0.11
        for block in blocks:
            manager.block_pool._maybe_evict_cached_block(manager.block_pool.blocks[block])


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """One running request, one failed block. Wrong is not to evict it, neither in the hook nor in what calls it."""
    evicted: list[Any] = []
    manager = SimpleNamespace(get_block_ids=lambda name: ([3],), evict_blocks=evicted.append)
    manager.block_pool = SimpleNamespace(blocks=[SimpleNamespace(ref_cnt=1, block_hash=None)] * 4)
    stub = SimpleNamespace(
        block_size=16, recompute_kv_load_failures=True, kv_cache_manager=manager, waiting=(), kv_holding_waiting=(),
        running=[probe.request(32, num_computed_tokens=20, num_cached_tokens=16)], failed_recving_kv_req_ids=set(),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]), skipped_waiting=(),
    )  # fmt: skip
    stub._update_requests_with_invalid_blocks = functools.partial(hook, stub)
    calls = inspect.unwrap(scheduler.Scheduler._handle_invalid_blocks)
    calls(stub, {3}, *([{probe.NAME: 4}] if "num_scheduled_tokens" in inspect.signature(calls).parameters else []))
    return not evicted


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function=_scheduler.TAKES_BACK,
            broken=">=0.11.2",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
