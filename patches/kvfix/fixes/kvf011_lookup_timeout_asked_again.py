"""A lookup takes too long, and the next question about its request kills EngineCore.

## Symptom
`Request ... is still waiting for async lookup after 3 seconds, returning 0 lmcache cached tokens so vllm can
recompute`, then `KeyError: '<request id>'` in the asynchronous lookup client, and EngineCore dies.

## Cause
With asynchronous loading the client gives up after `lookup_timeout_ms`: it answers 0 and forgets when the lookup began;
the lookup still counts as under way. If no blocks are free for the request in this step, vLLM asks again in the next,
and the client looks for the time that it has forgotten (lmcache_async_lookup_client.py 0.5.6:174, :187). To 0.3.15
nobody cancels the lookup either: the late answer is kept for a request that is gone, and so is what was fetched for it.

## Fix
A lookup that was given up stays so: 0, until its answer has come and was cleaned up. To 0.3.15 it is cancelled too, as
in 0.4.1.

## Releases
LMCache 0.3.10 to 0.5.6, with `enable_async_loading`.

## Upstream
https://github.com/LMCache/LMCache/issues/3685, https://github.com/LMCache/LMCache/pull/3766 is open.

## Remove when
`lookup_cache` answers for a lookup that it has given up.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
_UNKNOWN = -1


def given_up(client: Any, lookup_id: str) -> bool:
    """Under way, and nobody knows since when."""
    return client.reqs_status.get(lookup_id, _UNKNOWN) is None and lookup_id not in client.first_lookup_time


def correct(module: ModuleType) -> Callable[..., Any]:
    @around
    def lookup_cache(client: Any, lookup_id: str) -> Any:
        return instead(0) if given_up(client, lookup_id) else _cancelled(client, lookup_id)

    return lookup_cache


def _cancelled(client: Any, lookup_id: str) -> Generator[None, Any, Any]:
    """Where the hook gives it up: what comes of it is thrown away, as 0.4.1 does."""
    answer = yield
    if given_up(client, lookup_id):
        client.cancel_lookup(lookup_id)
    return answer


def correct_0_3_10(module: ModuleType) -> Callable[..., Any]:
    """There `lookup` itself remembers."""

    @around
    def lookup(client: Any, tokens: Any, lookup_id: str, request_configs: Any = None) -> Any:
        return instead(0) if given_up(client, lookup_id) else _cancelled(client, lookup_id)

    return lookup


def shows_bug(hook: Callable[..., Any], module: ModuleType, *tokens: Any) -> bool:
    """A lookup under way whose beginning is forgotten. Right is 0, wrong is a KeyError."""
    client = SimpleNamespace(
        lock=threading.Lock(),
        reqs_status={probe.NAME: None},
        first_lookup_time={},
        lookup_backoff_time=0,
        aborted_lookups=set(),
        timeout_ms=3000,
        config=SimpleNamespace(lookup_timeout_ms=3000),
        _cleanup_finished_aborted_lookups=lambda: None,
    )
    try:
        hook(client, *tokens, probe.NAME)
    except KeyError:
        return True
    return False


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=CLIENT,
            function="LMCacheAsyncLookupClient.lookup_cache",
            broken=">=0.3.10.post1",
            shows_bug=shows_bug,
            correct=correct,
        ),
        Patch(
            dist="lmcache",
            module=CLIENT,
            function="LMCacheAsyncLookupClient.lookup",
            broken="==0.3.10",
            shows_bug=lambda hook, module: shows_bug(hook, module, []),
            correct=correct_0_3_10,
        ),
    ),
)
