"""Requests wait for ever: one bad registration makes NixlPushConnector lose the notices that came with it.

## Symptom
With NixlPushConnector the log has `nixl-push-writer error; continuing`. Then leases of unrelated requests end early,
and unrelated requests stay in WAITING_FOR_REMOTE_KVS.

## Cause
The push writer thread of NixlPushConnector fetches all notices of the peers at once. The thread handles the notices one
after the other. One notice may raise, such as a registration that names more blocks than the prefill engine has. The
exception leaves the loop, and the thread loses the remaining notices (push_worker.py 0.32.0:355-361).

## Fix
The fix logs an exception of `_handle_push_reg_notif`, and the thread continues with the next notice. If the KV of a
request could not be written, the request waits until its lease and its registration have ended.

## Releases
vLLM 0.32.0 and 0.33.0. In 0.26.0 the code was read, not tested.

## Upstream
None known.

## Remove when
vLLM catches exceptions of a single registration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix import engine_log
from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_PUSH_WORKER


def fix(module: ModuleType) -> Callable[..., Any]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def _handle_push_reg_notif(worker: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(worker, *args, **kwargs)
            except Exception as error:
                if not hasattr(worker, "_pending_d_registrations"):
                    raise
                note(__name__, "a malformed registration was ignored")
                engine_log.warning(f"KVF325: ignored a malformed registration: {type(error).__name__}: {error}")
                return None

        return _handle_push_reg_notif

    return wrap


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A registration that cannot be served. Wrong is to raise."""

    def raises(*_: Any) -> None:
        raise KeyError

    worker = SimpleNamespace(
        _pop_matching_finished_blocks=lambda name: (name, ([1],)), _do_start_push_kv=raises, _pending_d_registrations={}
    )
    return stubs.raises(
        KeyError, hook, worker, module.PUSH_REG_NOTIF_PREFIX + module.msgspec.msgpack.encode({"request_id": stubs.NAME})
    )


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(NIXL_PUSH_WORKER._handle_push_reg_notif(broken=">=0.26", probe=shows_bug, fix=fix),),
    evidence={},
    scenarios=("nixl-push-thread-loses-notices",),
)
