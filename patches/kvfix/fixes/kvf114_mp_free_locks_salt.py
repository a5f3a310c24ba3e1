"""The locks of a request with a `cache_salt` are given back under another key, and held until they time out.

## Symptom
Nothing in the log of vLLM. With `cache_salt`, chunks that vLLM has itself stay read-locked in the server for the read
TTL (`read_ttl_seconds`, 300 s): under pressure it finds nothing to evict. And the same chunks without a salt, which
another request may have locked, lose a lock.

## Cause
`update_state_after_alloc` gives back the locks of what needs no load, and leaves the salt out
(lmcache_mp_connector.py 0.5.0:1003), which is part of the key.

## Fix
While the hook runs, the client's `free_lookup_locks` has the salt of the request.

## Releases
LMCache 0.4.5 to 0.5.0, and 0.4.5 to 0.5.4 with lmcache_mp_connector_0201. vLLM 0.26.0 to 0.32.0, its own copy of the
connector.

## Upstream
https://github.com/LMCache/LMCache/issues/3770, fixed in 0.5.1; https://github.com/vllm-project/vllm/pull/44097.

## Remove when
LMCache 0.5.0 is no longer in use, and vLLM's copy hands the salt over.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import around, replaced
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def update_state_after_alloc(
        connector: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> Generator[None, Any, Any]:
        return _salted(connector.scheduler_adapter, connector.request_trackers[request.request_id].cache_salt)

    salt = 'getattr(connector.request_trackers.get(request.request_id), "cache_salt", "")'
    return around(update_state_after_alloc, when=salt)


def _salted(adapter: Any, salt: str) -> Generator[None, Any, Any]:
    with replaced(adapter, free_lookup_locks=functools.partial(adapter.free_lookup_locks, cache_salt=salt)):
        return (yield)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """512 tokens were found, vLLM has them too."""
    connector, request = _mp.scheduler_side(module), _mp.request(cache_salt="tenant")
    tracker = connector.request_trackers[request.request_id] = module.LMCacheMPRequestTracker(request)
    for name in ("num_vllm_hit", "num_lmcache_hit"):
        _mp.set_tokens(tracker, name, 512)
    hook(connector, request, SimpleNamespace(get_block_ids=lambda: (list(range(32)),)), 0)
    (asked,) = [more for name, _, more in connector.scheduler_adapter.asked if name == "free_lookup_locks"]
    return bool(asked.get("cache_salt") != "tenant")


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches(
        "update_state_after_alloc",
        shows_bug,
        correct,
        lmcache=">=0.4.5,<=0.5.0",
        vllm=">=0.26.0",
        for_0201=">=0.4.5,<=0.5.4",
        for_0180="",
    ),
)
