"""A resumed request loads, the load fails, and vLLM does not see that it is this request's: wrong text, no error.

## Symptom
None but LMCache's `Request ... failed to load ... tokens across ... blocks`. Wrong text in one that was preempted,
also with kv_load_failure_policy "fail".

## Cause
vLLM looks for failed blocks among the first `num_cached_tokens` of each running request (scheduler.py 0.15.1:2007).
That is what was cached when it was scheduled for the first time; what it loads when it comes back is beyond it.

## Fix
While vLLM looks, the number reaches to the last failed block of the request.

## Releases
vLLM 0.11.2 to 0.15.1.

## Upstream
None known; fixed in 0.20.2, which counts from `num_computed_tokens`.

## Remove when
vLLM 0.15.1 is no longer in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(scheduler: ModuleType) -> Callable[..., Any]:
    def _update_requests_with_invalid_blocks(
        scheduler: Any, requests: Any, invalid_block_ids: Any, evict_blocks: bool = True
    ) -> Generator[None, Any, Any] | None:
        # Loads between steps are looked at in another way, and come as an iterator (0.11 has none of them).
        return _reaching_all(scheduler, requests, invalid_block_ids) if evict_blocks else None

    return around(_update_requests_with_invalid_blocks)


def _reaching_all(scheduler: Any, requests: Any, invalid_block_ids: Any) -> Generator[None, Any, Any]:
    before = [(request, request.num_cached_tokens) for request in requests]
    try:
        for request, cached in before:
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            failed = [place for place, block in enumerate(blocks) if block in invalid_block_ids]
            if failed:
                request.num_cached_tokens = max(cached, (failed[-1] + 1) * scheduler.block_size)
        answer = yield
    finally:
        for request, cached in before:
            request.num_cached_tokens = cached
    return answer


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """Nothing was cached at first, 16 tokens when it came back, and their block has failed. Wrong is not to see it."""
    affected, *_ = _scheduler.take_back(hook, probe.request(32, num_computed_tokens=20, num_cached_tokens=0))
    return not affected


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function=_scheduler.TAKES_BACK,
            broken=">=0.11.2,<0.20",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
