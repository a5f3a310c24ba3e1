"""A request shares blocks whose load failed, and counts them as computed, since another one will: if that is in time.

## Symptom
None but `Recovered from KV load failure: ... request(s) rescheduled (... tokens affected).` Wrong text in a request
that began in the same step, with the same prompt, as one whose load failed.

## Cause
A load within the step is in vLLM's prefix cache before it is done: others that are admitted in this step share its
blocks. If it fails, only the first of them goes back to the failed block; the others go on with all tokens as computed
(scheduler.py 0.32.0:3295). If the first is aborted or preempted then, or takes more than one step, they read blocks
that nobody has written.

## Fix
Each request goes back to the first block of its own that failed. Where two compute a block that they share, they write
the same into it.

## Releases
vLLM 0.11.2 to 0.32.0, with kv_load_failure_policy "recompute".

## Upstream
https://github.com/vllm-project/vllm/pull/37827 (closed) for asynchronous loads; that the others are left was decided in
https://github.com/vllm-project/vllm/pull/26813.

## Remove when
`_update_requests_with_invalid_blocks` takes every request back.
"""

from __future__ import annotations

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
        for name, first, _ in _scheduler.failed(scheduler, answer[0], invalid_block_ids, *more):
            request = scheduler.requests[name]
            request.num_computed_tokens = min(request.num_computed_tokens, first * scheduler.block_size)
        return answer

    return after(_update_requests_with_invalid_blocks)


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """Two requests that share the failed block. Wrong is to leave one of them where it is."""
    both = [probe.request(32, request_id=name, num_computed_tokens=20, num_cached_tokens=16) for name in "ab"]
    _scheduler.take_back(hook, *both)
    return any(request.num_computed_tokens for request in both)


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
