"""EngineCore dies when a preempted request resumes: LMCache expects its whole hit, and vLLM took fewer or more tokens.

Symptom: EngineCore dies in `build_connector_meta` when a preempted request is resumed. The error is one of these:
- `AssertionError: Preempted request ... has num_computed_tokens 800 but expected 1024 (full_hit_adj=False)`
- `... but max(lmcache_cached_tokens, vllm_cached_tokens) = 1024`, or `... but lmcache_cached_tokens 512`
- `AssertionError: Request ... is preempted but was not given a load spec`

LMCache 0.3.10 does not raise. LMCache stores chunks for a token list with a gap, and no request ever hits these chunks.

Cause: The LoadSpec holds the number of the request's tokens that LMCache has. On a resume, the connector asserts that
vLLM has computed exactly this number of tokens. The two numbers differ in five cases. First, the connector promised
fewer tokens (`min_retrieve_tokens`). Second, vLLM loads nothing from LMCache, because of prompt_logprobs or another
connector. Third, vLLM's prefix cache has more tokens than LMCache (up to 0.3.10.post2). Fourth, vLLM recomputes the
last token of a full hit (up to 0.4.2). Fifth, kv_role or the lookup client prevents lookups, so there is no LoadSpec.

Fix: The fix uses vLLM's number of computed tokens. If a resumed request loads nothing, the fix writes this number into
the LoadSpec before `build_connector_meta`, and restores the LoadSpec afterwards. If the request loads tokens, the fix
changes its LoadSpec only if vLLM recomputes the last token of a full hit.
- Upstream: None known for current releases; https://github.com/LMCache/LMCache/pull/2243 for 0.3.10.post1 and post2.
- Remove when: LMCache uses `request.num_computed_tokens` and no longer asserts the number.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, fix_around, note, stubs


@fix_around(when=lambda impl, output, *_, **__: output.scheduled_cached_reqs.resumed_req_ids)
def fix(impl: Any, scheduler_output: Any) -> Steps:
    as_hit = []
    try:
        for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            request, tracker = impl._unfinished_requests[name], impl._request_trackers[name]
            computed = request.num_computed_tokens
            # Up to LMCache 0.3.10.post2, the hook keeps the tracker's tokens. Later hooks replace the tokens.
            tracker.token_ids = list(request.all_token_ids[: computed + scheduler_output.num_scheduled_tokens[name]])
            spec = impl.load_specs.get(name)
            if spec is None:
                spec = impl.load_specs[name] = LMCACHE_V1.imported.LoadSpec(computed, 0, can_load=False)
            if not spec.can_load or spec.lmcache_cached_tokens == computed + 1:
                if computed != max(spec.vllm_cached_tokens, spec.lmcache_cached_tokens):
                    note(__name__, f"request {name}: {computed} tokens are computed")
                as_hit.append((spec, spec.vllm_cached_tokens, spec.lmcache_cached_tokens, name))
                spec.vllm_cached_tokens = spec.lmcache_cached_tokens = computed
        meta = yield
    finally:
        for spec, vllm, lmcache, _ in as_hit:
            spec.vllm_cached_tokens, spec.lmcache_cached_tokens = vllm, lmcache
    for _, _, hit, name in as_hit:
        _save_from(hit, impl._request_trackers[name], [each for each in meta.requests if each.req_id == name])


def _save_from(hit: int, tracker: Any, requests: list[Any]) -> None:
    """Start each save after the hit. A kv_producer saves even with can_save=False (0.5.6 vllm_v1_adapter.py:1152)."""
    specs = [(each.save_spec, len(each.token_ids)) for each in requests if each.save_spec is not None]
    for spec, tokens in specs:
        spec.skip_leading_tokens = min(hit, tokens)
    saved = any(spec.can_save for spec, _ in specs)
    tracker.num_saved_tokens = max(hit, tracker.num_saved_tokens if saved else 0)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Resume at 800 tokens and schedule 50. With the bug, the hook raises, or the tracker keeps 900 tokens, not 850."""
    specs = {stubs.NAME: adapter.LoadSpec(800, 1024, can_load=False)}
    impl, tracker = stubs.scheduled(adapter, 900, tracked=900, computed=800, load_specs=specs)
    step = stubs.step(50, computed=800, blocks=list(range(60)), resumed=True)
    return stubs.raises(AssertionError, hook, impl, step, text="Preempted request") or len(tracker.token_ids) != 850


FIX = Fix(
    LMCACHE_V1.build_connector_meta(broken=">=0.3.10", probe=shows_bug, fix=fix, order=1),
    effect="crash",
    evidence={
        "KVD103": "", "KVD104": "", "KVD105": "", "KVD106": "", "KVD107": "",
        "KVR011": "Preempted request|is preempted but was not given a load spec",
    },
    scenarios=(
        "preempt-full-hit", "preempt-local-exceeds-lmcache", "preempt-min-retrieve", "preempt-multiconnector-loser",
        "preempt-prompt-logprobs",
    ),
)  # fmt: skip
