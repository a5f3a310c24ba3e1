"""EngineCore dies with `Mismatch in tokens to load`: LMCache promises a cached hit without subtracting computed tokens.

Symptom: EngineCore dies with one of these errors:

- `AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full lmcache
  hits subtracts last token to recalculate logits) for request ...`
- a bare `AssertionError` in vLLM's scheduler, at `assert num_new_tokens > 0` or at a comparison of token counts

At the second lookup of the request, LMCache may log: `LMCache hit tokens: 256, need to load: -80`.

Cause: At the first `get_num_new_matched_tokens` of a request, the lookup client caches the hit. If there are too few
free blocks, vLLM calls the function again. The second call returns the whole cached hit. LMCache does not subtract the
computed tokens, or the last token of a full hit, which vLLM must recompute. `update_state_after_alloc` compares the
returned number with the LoadSpec, and raises.

Fix: The correct result is `max(0, hit - computed - (1 if the hit is the whole request else 0))`. If LMCache returns
another number, the fix returns the correct result and makes the LoadSpec match the result.
- Releases: LMCache 0.3.10 only. Earlier releases do a lookup in every call. 0.3.10.post1 corrects the cached hit.
- Upstream: https://github.com/LMCache/LMCache/issues/2158 (also 2090, 2091, 2159), fixed in 0.3.10.post1.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_after, stubs
from kvfix.ledger.events import balance


# The hook returns None while the lookup is running, and 0 if there is nothing to load. Both results are right.
@fix_after(when=lambda impl, promised, *_, **__: promised)
def fix(impl: Any, promised: int, request: Any, num_computed_tokens: int) -> int:
    spec = impl.load_specs.get(request.request_id)
    accounted = spec is not None and spec.vllm_cached_tokens == num_computed_tokens
    total = request.num_tokens
    if accounted and promised == max(0, balance(spec.lmcache_cached_tokens, num_computed_tokens, total)):
        return promised
    hit = promised
    if not accounted or spec.lmcache_cached_tokens != hit:
        impl.load_specs[request.request_id] = LMCACHE_V1.imported.LoadSpec(num_computed_tokens, hit, can_load=False)
    return max(0, balance(hit, num_computed_tokens, total))


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Call the hook with a cached hit of 256 tokens and 336 computed tokens. The bug returns 256 instead of 0."""
    answer = hook(stubs.scheduler_side(lookup_client=stubs.lookup_client(256)), stubs.request(10009), 336)
    if answer not in (0, 256):
        raise ValueError(f"the probe expects 0 or 256, got {answer!r}")
    return bool(answer == 256)


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken="==0.3.10", probe=shows_bug, fix=fix, order=1),
    effect="crash",
    evidence={"KVD101": "", "KVR001": "", "KVR002": "", "KVR003": "", "KVR011": "Mismatch in tokens to load"},
    scenarios=("full-hit-asked-twice", "mismatch-in-tokens-to-load", "raw-hit-beyond-request"),
)
