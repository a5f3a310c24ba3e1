"""With states and several MTP modules the last tokens of a prompt are never scheduled: the request runs for ever.

## Symptom
`Running: 1 reqs` and more for ever, no throughput for these requests, no error, their blocks in use. Models with Mamba
or GDN layers (`mamba_cache_mode="align"`) and speculative decoding by several MTP modules, when the engine is busy.

## Cause
A chunk of a prompt is cut to end where a state is kept (`_mamba_block_aligned_split`, scheduler.py 0.32.0:443). Then it
is shortened so that it does not end within `num_prefill_lookahead` tokens of the prompt's end, but for the end itself
(`_reserve_prefill_lookahead`, :570). If fewer tokens than that follow the last whole block, the chunk ends before the
block does. The next one may go up to the block's end only, which is too near: it is shortened to nothing, in each step.
It takes a step whose budget does not reach to the prompt's end.

## Fix
A chunk that would be shortened to nothing is left as it is, where states are kept. The MTP modules then guess some
tokens that they could know, and fewer of their drafts are accepted.

## Releases
vLLM 0.32.0 and 0.33.0, the first ones that were played with states.

## Upstream
None known.

## Remove when
What is left of a chunk after both is scheduled at some time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SCHEDULER
from kvfix.wrapping import after


def fix(module: ModuleType) -> Callable[..., Any]:
    def _reserve_prefill_lookahead(scheduler: Any, answer: int, request: Any, computed: int, tokens: int) -> int:
        return tokens

    return after(
        _reserve_prefill_lookahead,
        when=lambda scheduler, answer, request, computed, tokens: (
            not answer and tokens > 0 and scheduler.need_mamba_block_aligned_split
        ),
    )


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Of 50 tokens 46 are computed, and 2 are left of the block. Wrong is to compute none."""
    scheduler = SimpleNamespace(num_prefill_lookahead=4, need_mamba_block_aligned_split=True)
    return bool(hook(scheduler, SimpleNamespace(num_tokens=50), 46, 2) == 0)


FIX = Fix(
    __name__,
    __doc__,
    targets=(SCHEDULER._reserve_prefill_lookahead(broken=">=0.32", probe=shows_bug, fix=fix),),
    scenarios=("lookahead-stops-prefill",),
)
