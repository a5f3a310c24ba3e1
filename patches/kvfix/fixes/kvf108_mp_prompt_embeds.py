"""Two prompts given as embeddings of the same length share KV: their key is made of the zeros that stand for tokens.

## Symptom
No error. With `--enable-prompt-embeds`, a prompt of embeddings gets the answer to another one of the same length, and a
prompt whose tokens are zeros gets theirs.

## Cause
vLLM fills `all_token_ids` of such a request with zeros (v1/request.py 0.32.0:148), and the connector makes its keys of
them (lmcache_mp_connector.py 0.5.6:1288).

## Fix
A request with `prompt_embeds` is answered with nothing cached, no lookup is sent, and its tracker counts as stored
whatever it will compute. vLLM's own prefix cache, which hashes the embeddings, goes on.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
https://github.com/vllm-project/vllm/issues/42119 (closed as stale).

## Remove when
The connector tells embeddings from tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

#: More tokens than any request has.
ALL = 1 << 40


def correct(module: ModuleType) -> Callable[..., Any]:
    def asks(connector: Any, request: Any, num_computed_tokens: int = 0) -> Any:
        return _not_cached(connector, request)

    return around(asks, when="request.prompt_embeds is not None")


def _not_cached(connector: Any, request: Any) -> Generator[None, Any, Any]:
    _mp.nothing_cached(connector.scheduler_adapter, request.request_id)
    answer = yield
    tracker = connector.request_trackers.get(request.request_id)
    if tracker is not None:
        _mp.set_tokens(tracker, "num_stored", ALL, _mp.block_size(connector))
    return answer


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """512 zeros are cached."""
    connector = _mp.scheduler_side(module, found=512)
    return bool(hook(connector, _mp.request(prompt_embeds=object()), 0)[0])


def arrival_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A request with embeddings arrives, and lookups are sent as requests arrive."""
    connector = _mp.scheduler_side(module)
    connector._eager_prefetch, connector._role = True, module.KVConnectorRole.SCHEDULER
    hook(connector, _mp.request(prompt_embeds=object(), resumable=False))
    return "maybe_submit_lookup_request" in connector.scheduler_adapter.names()


_, _MODULE, _OWNER = _mp.LMCACHE
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        *_mp.patches("get_num_new_matched_tokens", shows_bug, correct, lmcache=">=0.4.5,<=0.5.6", vllm=">=0.26.0"),
        Patch("lmcache", _MODULE, f"{_OWNER}.on_new_request", ">=0.5.4,<=0.5.6", arrival_shows_bug, correct),
    ),
)
