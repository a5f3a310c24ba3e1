"""A request runs for ever without a token: with Mamba states and several MTP modules its last tokens are not scheduled.

Symptom: The log shows `Running: 1 reqs` or more for ever, without throughput and without an error. The model has Mamba
or GDN layers (`mamba_cache_mode="align"`) and speculative decoding with several MTP modules, and the engine is busy.

Cause: vLLM ends a chunk of a prompt where vLLM keeps a state (`_mamba_block_aligned_split`, scheduler.py 0.32.0:443).
Then vLLM shortens a chunk that ends less than `num_prefill_lookahead` tokens before the prompt's end
(`_reserve_prefill_lookahead`, :570). vLLM does not shorten a chunk that ends at the prompt's end.

Suppose that fewer tokens than `num_prefill_lookahead` follow the last whole block of the prompt. vLLM then shortens a
chunk that should end with this block. The rest of the block becomes the next chunk. vLLM shortens the next chunk to 0
tokens in each step. The hang starts in a step whose token budget is smaller than the rest of the prompt.

Fix: If vLLM shortens a chunk to 0 tokens for a Mamba model, the fix restores the chunk. vLLM then accepts fewer drafts.
- Remove when: vLLM cuts tokens off a chunk only if a later step schedules these tokens.
"""

import inspect

from kvfix.fixes.api import SCHEDULER, Any, Fix, Steps, fix_around, note, replaced, stubs


# With a lookahead of 0 or 1 token, vLLM shortens no chunk.
@fix_around(only=lambda sched: sched.need_mamba_block_aligned_split and sched.num_prefill_lookahead > 1)
def schedule(scheduler: Any, *_: Any, **__: Any) -> Steps:
    """Replace `_reserve_prefill_lookahead` during the step, only for models with Mamba states."""
    shortened = scheduler._reserve_prefill_lookahead

    def _reserve_prefill_lookahead(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        kept: int = shortened(request, num_computed_tokens, num_new_tokens)
        if not kept and num_new_tokens > 0:
            note(__name__, f"request {request.request_id}: {num_new_tokens} tokens are scheduled")
        return kept or max(num_new_tokens, 0)

    with replaced(scheduler, _reserve_prefill_lookahead=_reserve_prefill_lookahead):
        return (yield)


def shows_bug(hook: Any, module: Any) -> bool:
    """Schedule 2 tokens to complete a block, after 46 of 50 tokens. With the bug, no token is scheduled."""
    scheduler = stubs.Stub(num_prefill_lookahead=4, need_mamba_block_aligned_split=True)
    return bool(hook(scheduler, stubs.Stub(num_tokens=50), 46, 2) == 0)


def calls_it(hook: Any, module: Any) -> bool:
    """Return True if `schedule` calls `_reserve_prefill_lookahead` by its name, else raise ValueError."""
    if "_reserve_prefill_lookahead" not in inspect.unwrap(hook).__code__.co_names:
        raise ValueError("schedule does not call _reserve_prefill_lookahead")
    return True


FIX = Fix(
    SCHEDULER._reserve_prefill_lookahead(broken=">=0.32", probe=shows_bug, fix=None),
    SCHEDULER.schedule(broken=">=0.32", probe=calls_it, fix=schedule, helper=True),
    effect="hang",
)
