"""A preempted request comes back with what was granted, and the connector expects what was hit.

## Symptom
EngineCore dies in `build_connector_meta` when a preempted request is resumed, with one of
- `AssertionError: Preempted request ... has num_computed_tokens 800 but expected 1024 (full_hit_adj=False)`
- `... but max(lmcache_cached_tokens, vllm_cached_tokens) = 1024`, or `... but lmcache_cached_tokens 512`
- `AssertionError: Request ... is preempted but was not given a load spec`

0.3.10 goes on, with tokens missing from the middle of what it then stores: no hit is ever made of those chunks.

## Cause
The LoadSpec keeps what LMCache has. What vLLM took of the promise is not recorded, and on a resume the two are asserted
to be the same. They are not when the connector itself promised less (`min_retrieve_tokens`), when vLLM took nothing
(prompt_logprobs, another connector of a MultiConnector), when vLLM has more than LMCache (to 0.3.10.post2), when
all tokens are hit and the last is computed again (to 0.4.2), or when there is no LoadSpec at all (a role or a client
that does not look up).

## Fix
vLLM's own count of computed tokens is the truth. For a resumed request that loads nothing, the LoadSpec says what vLLM
has while the hook runs, and what was hit afterwards. A load that was granted is left alone, but for the last token of a
full hit.

## Releases
LMCache 0.3.10 to 0.5.6.

## Upstream
None known for the live causes; https://github.com/LMCache/LMCache/pull/2243 for 0.3.10.post1 and post2.

## Remove when
LMCache takes `request.num_computed_tokens` instead of asserting it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe, step
from kvfix.correction import around
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    load_spec = adapter.LoadSpec

    def build_connector_meta(impl: Any, scheduler_output: Any) -> Generator[None, Any, Any] | None:
        names = step.resumed(scheduler_output)
        return _as_granted(load_spec, impl, scheduler_output, names) if names else None

    # vLLM 0.11 has another list, which is then looked for.
    return around(build_connector_meta, when='getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", True)')


def _as_granted(load_spec: Any, impl: Any, scheduler_output: Any, names: Any) -> Generator[None, Any, Any]:
    as_hit = []
    try:
        for name in names:
            request, tracker = impl._unfinished_requests[name], impl._request_trackers[name]
            computed = request.num_computed_tokens
            until = computed + scheduler_output.num_scheduled_tokens[name]
            # To 0.3.10.post2 the hook keeps the tracker's own tokens, from 0.3.11 on it takes the request's.
            tracker.token_ids = list(request.all_token_ids[:until])
            spec = impl.load_specs.get(name)
            if spec is None:
                spec = impl.load_specs[name] = load_spec(computed, 0, can_load=False)
            if not spec.can_load or spec.lmcache_cached_tokens == computed + 1:
                as_hit.append((spec, spec.vllm_cached_tokens, spec.lmcache_cached_tokens, name))
                spec.vllm_cached_tokens = spec.lmcache_cached_tokens = computed
        meta = yield
    finally:
        for spec, vllm, lmcache, _ in as_hit:
            spec.vllm_cached_tokens, spec.lmcache_cached_tokens = vllm, lmcache
    for _, _, hit, name in as_hit:
        _save_from(hit, impl._request_trackers[name], [each for each in meta.requests if each.req_id == name])
    return meta


def _save_from(hit: int, tracker: Any, requests: list[Any]) -> None:
    """What was hit is saved already, and no more than that: saving goes on there, now and in the steps to come.

    A kv_producer's worker saves also where the spec says not to (0.5.6 vllm_v1_adapter.py:1152).
    """
    specs = [(each.save_spec, len(each.token_ids)) for each in requests if each.save_spec is not None]
    for spec, tokens in specs:
        spec.skip_leading_tokens = min(hit, tokens)
    saved = any(spec.can_save for spec, _ in specs)
    tracker.num_saved_tokens = max(hit, tracker.num_saved_tokens if saved else 0)


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """Resumed with 800 computed tokens, 1024 hit and none granted, to compute 50. Right is a tracker of 850 tokens,
    wrong is another one, or an AssertionError."""
    blocks = list(range(60))
    tracker = adapter.RequestTracker(probe.NAME, 900, [0] * 900, blocks)
    impl = probe.scheduler_side(
        load_specs={probe.NAME: adapter.LoadSpec(800, 1024, can_load=False)},
        _request_trackers={probe.NAME: tracker},
        _unfinished_requests={probe.NAME: probe.request(900, num_computed_tokens=800)},
    )
    try:
        hook(impl, probe.step(50, computed=800, blocks=blocks, resumed=True))
    except AssertionError as error:
        if "Preempted request" not in str(error):
            raise
        return True
    return len(tracker.token_ids) != 850


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.3.10",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
