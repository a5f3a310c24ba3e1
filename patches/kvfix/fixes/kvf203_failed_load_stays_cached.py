"""Blocks whose load failed stay in vLLM's prefix cache, and the next request reads them: wrong text, no error.

## Symptom
`Recovered from KV load failure: ... request(s) rescheduled (... tokens affected).` Later, wrong text in requests that
begin with the same prompt.

## Cause
With kv_load_failure_policy "recompute" vLLM leaves the blocks in the prefix cache, since the request is to compute them
again at once (scheduler.py 0.32.0:3412). If it is aborted or preempted before that, nobody does.

## Fix
They are taken out of the prefix cache with either policy. The request keeps them; only others cannot find them.

## Releases
vLLM 0.32.0.

## Upstream
None known.

## Remove when
`_handle_invalid_blocks` evicts them, or puts them back only once they are computed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.fix import Fix, Patch, after

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(scheduler: ModuleType) -> Callable[..., Any]:
    def _update_requests_with_invalid_blocks(scheduler: Any, answer: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = answer[2]
        if blocks and scheduler.recompute_kv_load_failures:
            scheduler.kv_cache_manager.evict_blocks(blocks)
        return answer

    return after(_update_requests_with_invalid_blocks)


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """One running request, one failed block. Wrong is not to evict it."""
    evicted: list[Any] = []
    manager = SimpleNamespace(get_block_ids=lambda name: ([3],), evict_blocks=evicted.append)
    stub = SimpleNamespace(block_size=16, recompute_kv_load_failures=True, kv_cache_manager=manager)
    hook(stub, [probe.request(32, num_computed_tokens=20)], {3}, {probe.NAME: 4}, evict_blocks=True)
    return not evicted


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="vllm",
            module="vllm.v1.core.sched.scheduler",
            function="Scheduler._update_requests_with_invalid_blocks",
            broken="==0.32.0",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
