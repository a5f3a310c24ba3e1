"""A request that reads no cache is looked up all the same, and what it locks stays locked until that times out.

## Symptom
Nothing in the log of vLLM. With requests that ask for `prompt_logprobs`, or pooling requests that skip the cache,
chunks stay read-locked in the server for the read TTL (`read_ttl_seconds`, 300 s): under pressure it finds nothing to
evict.

## Cause
vLLM asks the connector for every request and drops the answer for one with `skip_reading_prefix_cache`
(scheduler.py 0.32.0:983), also the answer that the lookup is still running. The request is admitted; the connector
forgets its lookup (lmcache_mp_connector.py 0.5.6:1432) before it knows what was found, so it gives nothing back.

## Fix
A request that reads no cache is answered with nothing cached, and no lookup is sent. It is stored as before.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
None known.

## Remove when
The connector does not look up what will not be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import before
from kvfix.fix import Fix, Patch
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def asks(connector: Any, request: Any, num_computed_tokens: int = 0) -> None:
        _mp.nothing_cached(connector.scheduler_adapter, request.request_id)

    return before(asks, when="request.skip_reading_prefix_cache")


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """It asks the client, and 512 tokens are cached."""
    connector = _mp.scheduler_side(module, found=512)
    return bool(hook(connector, _mp.request(skip_reading_prefix_cache=True), 0)[0])


def arrival_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """It arrives, and lookups are sent as requests arrive."""
    connector = _mp.scheduler_side(module)
    connector._eager_prefetch, connector._role = True, module.KVConnectorRole.SCHEDULER
    hook(connector, _mp.request(skip_reading_prefix_cache=True, resumable=False))
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
