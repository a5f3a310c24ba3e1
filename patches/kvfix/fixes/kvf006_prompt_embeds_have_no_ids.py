"""A prompt given as embeddings has no token ids, and EngineCore dies counting them.

## Symptom
`TypeError: object of type 'NoneType' has no len()` in `RequestTracker.from_new_request`, and EngineCore dies, at the
first request with `prompt_embeds`.

## Cause
The tracker counts and copies `prompt_token_ids`, which is None for such a request (0.5.6 vllm_v1_adapter.py:190). The
lookup goes by `all_token_ids`, which vLLM fills with zeros (vllm/v1/request.py 0.32.0:148): all prompts of one length
would share their KV.

## Fix
LMCache has no key for embeddings, so such a request is neither looked up nor loaded nor stored. The hook sees it with
as many zeros as it has tokens.

## Releases
LMCache 0.3.9 to 0.5.6.

## Upstream
https://github.com/vllm-project/vllm/issues/42119

## Remove when
LMCache leaves such requests out, or has embeddings in its keys.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct_lookup(adapter: ModuleType) -> Callable[..., Any]:
    def get_num_new_matched_tokens(impl: Any, request: Any, num_computed_tokens: int) -> Any:
        return instead(0)

    return around(get_num_new_matched_tokens, when="request.prompt_embeds is not None")


def correct_metadata(adapter: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(impl: Any, scheduler_output: Any) -> Generator[Any, Any, Any] | None:
        for new in scheduler_output.scheduled_new_reqs:
            if new.prompt_token_ids is None:
                return _not_cached(impl, scheduler_output)
        return None

    return around(build_connector_meta, when="scheduler_output.scheduled_new_reqs")


def _not_cached(impl: Any, scheduler_output: Any) -> Generator[Any, Any, Any]:
    names = [new.req_id for new in scheduler_output.scheduled_new_reqs if new.prompt_token_ids is None]
    seen = copy.copy(scheduler_output)
    seen.scheduled_new_reqs = [
        _with_zeros(new) if new.req_id in names else new for new in scheduler_output.scheduled_new_reqs
    ]
    meta = yield (seen,)
    for name in names:
        impl._request_trackers[name].skip_save = True  # in all steps to come
    meta.requests = [each for each in meta.requests if each.req_id not in names]
    return meta


def _with_zeros(new_request: Any) -> Any:
    seen = copy.copy(new_request)
    embeds = getattr(new_request, "prompt_embeds", None)
    seen.prompt_token_ids = [0] * (len(embeds) if embeds is not None else 0)
    return seen


def lookup_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request with embeddings, and the zeros in its place in the cache. Right is 0, wrong is the hit."""
    impl = probe.scheduler_side(lookup_client=probe.lookup_client(256))
    return bool(hook(impl, probe.request(300, prompt_token_ids=None, prompt_embeds=[0] * 300), 0) != 0)


def metadata_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A new request without token ids. Wrong is a TypeError."""
    blocks = (list(range(20)),)
    new = probe.request(300, req_id=probe.NAME, prompt_token_ids=None, prompt_embeds=[0] * 300, block_ids=blocks)
    try:
        hook(probe.scheduler_side(), probe.step(300, new=new))
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        return True
    return False


ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.get_num_new_matched_tokens",
            broken=">=0.3.9",
            shows_bug=lookup_shows_bug,
            correct=correct_lookup,
        ),
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.3.9",
            shows_bug=metadata_shows_bug,
            correct=correct_metadata,
        ),
    ),
)
