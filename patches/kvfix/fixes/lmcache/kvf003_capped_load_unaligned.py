"""EngineCore dies with `max_tokens_per_load`: LMCache promises the whole cap, but loads only up to a chunk boundary.

Symptom: EngineCore dies with `AssertionError: Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens
in vllm) - 0 (...)`. The error needs a load that is longer than the cap, and a hit of vLLM that ends within a chunk.

Cause: `get_num_new_matched_tokens` promises the whole cap, but writes a LoadSpec that ends at the chunk boundary below
`computed + cap`. With 80 computed tokens and a cap of 1,024, the hook promises 1,024 tokens, but the LoadSpec ends at
token 1,024, after 944 new tokens (0.5.6 vllm_v1_adapter.py:1490-1525). `update_state_after_alloc` then raises.

Fix: The fix promises only the tokens between vLLM's computed tokens and the end of the LoadSpec.
- Upstream: None known; `max_tokens_per_load` came with https://github.com/LMCache/LMCache/pull/3382.
- Remove when: LMCache promises `capped_lmcache_tokens - num_computed_tokens`.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_after, stubs


@fix_after(only=lambda impl: impl._max_tokens_per_load, when=lambda impl, promised, *_, **__: promised)
def fix(impl: Any, promised: int, request: Any, num_computed_tokens: int) -> int:
    spec = impl.load_specs[request.request_id]
    if spec.lmcache_cached_tokens == request.num_tokens:  # LMCache has all tokens, and the cap is not reached
        return promised
    due: int = spec.lmcache_cached_tokens - num_computed_tokens
    return max(0, due)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Look up a hit of 1280 tokens with 80 computed tokens and a cap of 1024. The bug promises 1024 tokens, not 944."""
    impl = stubs.scheduler_side(lookup_client=stubs.lookup_client(1280), _max_tokens_per_load=1024)
    answer = hook(impl, stubs.request(1500), 80)
    if answer not in (944, 1024):
        raise ValueError(f"the probe expects 944 or 1024, got {answer!r}")
    return bool(answer == 1024)


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.4.7", probe=shows_bug, fix=fix, order=2),
    effect="crash",
    evidence={"KVD102": "", "KVR003": "", "KVR004": "", "KVR011": "Mismatch in tokens to load"},
    scenarios=("max-load-unaligned",),
)
