"""Two adapters share KV through the multi-process server: the name of a LoRA is no part of the cache key.

Opt-in: it changes the keys of requests with a LoRA, so what was stored for them is not found again; and the server
counts each adapter as a tenant of its own where it has quotas by `cache_salt`.

## Symptom
No error. With `--enable-lora`, a prompt that another adapter (or the base model) has served gets KV of that one.

## Cause
The key is made of the model, the tokens and `cache_salt` (lmcache_mp_metadata.py 0.5.6:91). The adapter changes the KV
and is not in it. vLLM's own prefix cache has the name of the adapter in its hashes.

## Fix
The tracker of a request with a LoRA gets a `cache_salt` that is made of the request's own and the name of the adapter.
Lookups, loads and stores take it from there.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.5 to 0.5.5 with lmcache_mp_connector_0201. vLLM 0.26.0 to 0.32.0, its own copy of the
connector.

## Upstream
https://github.com/LMCache/LMCache/issues/2961, https://github.com/vllm-project/vllm/issues/44250 (open).

## Remove when
The adapter is in the key.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def salt(own: str, lora_name: str) -> str:
    """The same on every machine, and of characters that are safe in file names and keys."""
    return f"{own}+lora-{hashlib.sha256(lora_name.encode()).hexdigest()[:16]}"


def correct(module: ModuleType) -> Callable[..., Any]:
    def __init__(tracker: Any, answer: None, request: Any) -> None:
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            tracker.cache_salt = salt(request.cache_salt or "", lora.lora_name)
        return answer

    return after(__init__)


class _LoRA:
    lora_name = "kvfix-probe"


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """The same request with an adapter and without."""
    salts = []
    for lora in (None, _LoRA()):
        tracker = module.LMCacheMPRequestTracker.__new__(module.LMCacheMPRequestTracker)
        hook(tracker, _mp.request(cache_salt="tenant", lora_request=lora))
        salts.append(tracker.cache_salt)
    return bool(salts[0] == salts[1])


_INIT = "LMCacheMPRequestTracker.__init__"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch("lmcache", _mp.LMCACHE[1], _INIT, ">=0.4.5,<=0.5.3", shows_bug, correct),
        Patch("lmcache", "lmcache.integration.vllm.lmcache_mp_metadata", _INIT, ">=0.5.4,<=0.5.6", shows_bug, correct),
        Patch("lmcache", _mp.FOR_0201[1], _INIT, ">=0.4.5", shows_bug, correct),
        Patch("vllm", _mp.IN_TREE[1], _INIT, ">=0.11.2", shows_bug, correct),
    ),
    opt_in=True,
)
