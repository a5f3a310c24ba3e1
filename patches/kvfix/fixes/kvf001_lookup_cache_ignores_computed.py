"""A hit that comes from the lookup cache is promised whole: what vLLM has computed is not subtracted.

## Symptom
One of these, and EngineCore dies:
- `AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full lmcache
  hits subtracts last token to recalculate logits) for request ...`
- a bare `AssertionError` at `assert num_new_tokens > 0`, or at the comparison of computed tokens with the tokens of
  the request, in vLLM's scheduler: the raw hit is larger than what remains of the request.
- The log may show the same request asked again, `LMCache hit tokens: 256, need to load: -80`.

## Cause
`get_num_new_matched_tokens` looks a request up once and keeps the hit in the lookup client until the request is
scheduled. The first call answers `hit - computed`; a second call, which comes when there were too few free blocks,
finds the cached hit and returns it as it is. It forgets the computed tokens, and the last token of a prompt that is
cached whole, which has to be recomputed. The LoadSpec still holds the first balance, so `update_state_after_alloc`
finds 256 promised where 256 - 336 was due. Chunked prefill and preemption make it happen: 336 tokens stay in vLLM's
prefix cache, LMCache holds one chunk of 256.

## Fix
After each answer: if it is not the balance that the LoadSpec accounts for with the present computed tokens, it is a
raw hit. The balance is `max(0, hit - computed - (1 if the hit is the whole request else 0))`, and the LoadSpec is
written anew to match. An answer that is right is left alone.

## Releases
LMCache 0.3.10. 0.3.9.post2 and earlier look up again on every call; 0.3.10.post1 takes the balance from the cached hit.

## Upstream
https://github.com/LMCache/LMCache/issues/2158 (also 2090, 2091, 2159), fixed in 0.3.10.post1.

## Remove when
LMCache 0.3.10 is no longer in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def balance(hit: int, computed: int, total: int) -> int:
    """Tokens to load: the hit, less what vLLM has computed, less the last token if all of the request is hit."""
    due = hit - computed - (hit == total)
    return due if due > 0 else 0


def correct(adapter: ModuleType) -> Callable[..., Any]:
    load_spec = adapter.LoadSpec

    def get_num_new_matched_tokens(
        impl: Any, promised: int | None, request: Any, num_computed_tokens: int
    ) -> int | None:
        if not promised:  # None: the lookup is still running; 0: nothing to load
            return promised
        spec = impl.load_specs.get(request.request_id)
        accounted = spec is not None and spec.vllm_cached_tokens == num_computed_tokens
        total = request.num_tokens
        if accounted and promised == balance(spec.lmcache_cached_tokens, num_computed_tokens, total):
            return promised
        hit = promised
        if not accounted or spec.lmcache_cached_tokens != hit:
            impl.load_specs[request.request_id] = load_spec(num_computed_tokens, hit, can_load=False)
        return balance(hit, num_computed_tokens, total)

    return after(get_num_new_matched_tokens)


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """The report's numbers: 256 in the lookup cache, 336 computed, 10009 in all. Right is 0."""
    answer = hook(probe.scheduler_side(lookup_client=probe.lookup_client(256)), probe.request(10009), 336)
    if answer not in (0, 256):
        raise ValueError(f"the probe expects 0 or 256, got {answer!r}")
    return bool(answer == 256)


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.get_num_new_matched_tokens",
            broken="==0.3.10",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
