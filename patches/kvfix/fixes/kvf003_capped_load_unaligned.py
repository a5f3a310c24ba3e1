"""A load capped by `max_tokens_per_load` is promised whole, and its LoadSpec ends at a chunk: the two differ.

## Symptom
`AssertionError: Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens in vllm) - 0 (...)`, and
EngineCore dies. No preemption is needed: a prefix hit of vLLM that is no multiple of LMCache's chunk, and a hit of
LMCache larger than the cap.

## Cause
`get_num_new_matched_tokens` promises the cap, and writes a LoadSpec that ends at the chunk boundary below `computed +
cap`. With 80 computed tokens and a cap of 1,024 that is 1,024, of which 944 are new (0.5.6
vllm_v1_adapter.py:1490-1525). `update_state_after_alloc` asserts that the two are equal.

## Fix
What is promised is what the LoadSpec says: its end less what vLLM has computed.

## Releases
LMCache 0.4.7 to 0.5.6, with `max_tokens_per_load` set.

## Upstream
None known; the option came with https://github.com/LMCache/LMCache/pull/3382.

## Remove when
LMCache promises `capped_lmcache_tokens - num_computed_tokens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    def get_num_new_matched_tokens(impl: Any, promised: int, request: Any, num_computed_tokens: int) -> int:
        spec = impl.load_specs[request.request_id]
        if spec.lmcache_cached_tokens == request.num_tokens:  # not capped: one less than all
            return promised
        due: int = spec.lmcache_cached_tokens - num_computed_tokens
        return max(0, due)

    return after(get_num_new_matched_tokens, when="promised and impl._max_tokens_per_load")


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """80 computed tokens, a hit of 1280, a cap of 1024, chunks of 256. Right is 944, wrong is 1024."""
    impl = probe.scheduler_side(lookup_client=probe.lookup_client(1280), _max_tokens_per_load=1024)
    answer = hook(impl, probe.request(1500), 80)
    if answer not in (944, 1024):
        raise ValueError(f"the probe expects 944 or 1024, got {answer!r}")
    return bool(answer == 1024)


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.get_num_new_matched_tokens",
            broken=">=0.4.7",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
