"""A worker that has had no request for an hour is forgotten by the server, and what it then loads fails.

## Symptom
Server: `Reaped GPU instance ...: silent for 3600.0s (pinged=False)`. At the first request afterwards
`No GPU context registered for instance ID ...` (up to 0.5.4, and the request hangs) or `Rejecting RETRIEVE for
unregistered GPU instance ID ...`.

## Cause
The server forgets workers that have never pinged after `worker_registration_grace_seconds`
(multiprocess/config.py 0.5.6:134). A worker pings from its first store or load on, not from its registration
(vllm_multi_process_adapter.py 0.5.6:1811, 1892).

## Fix
After `register_kv_caches` the worker's heartbeat starts.

## Releases
LMCache 0.4.5 to 0.5.6; servers forget from 0.5.0 on.

## Upstream
https://github.com/LMCache/LMCache/issues/4715 (open).

## Remove when
A worker pings from its registration on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def register_kv_caches(adapter: Any, answer: None, *_: Any, **__: Any) -> None:
        adapter._ensure_heartbeat_started()
        return answer

    return after(register_kv_caches)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A registration: does it start the heartbeat?"""
    started: list[bool] = []
    adapter = SimpleNamespace(
        lmcache_tokens_per_chunk=256,
        _send_register_kv_caches_request=lambda kv_caches: None,
        _ensure_heartbeat_started=lambda: started.append(True),
    )
    # A layout that is given is not asked for; releases before 0.5.5 ask for it where this stub stands.
    hook(adapter, {}, **({"layout_hints": {}} if "layout_hints" in hook.__code__.co_varnames else {}))
    return not started


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPWorkerAdapter.register_kv_caches",
            broken=">=0.4.5,<=0.5.6",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
