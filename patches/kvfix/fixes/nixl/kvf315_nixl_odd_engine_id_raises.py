"""The decode engine dies: the parameters of a request name the prefill engine by a value that is not a string.

## Symptom
EngineCore of the decode engine dies with `TypeError: unhashable type` in `on_new_request`.

## Cause
on_new_request uses `remote_engine_id` and `remote_request_id` of the request's parameters as keys (base_scheduler.py
0.32.0:236). The values come with the request, and may be a list.

## Fix
A request with a value that is not a string loads nothing: it computes its prompt itself.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM checks the types of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_BASE_SCHEDULER
from kvfix.wrapping import before


def fix(module: ModuleType) -> Callable[..., Any]:
    def on_new_request(connector: Any, request: Any) -> None:
        note(__name__, f"request {request.request_id} names its peer by a value that is not a string")
        request.kv_transfer_params["do_remote_prefill"] = False

    return before(on_new_request, when=lambda connector, request: not _names(request.kv_transfer_params))


def _names(params: Any) -> bool:
    given = params or {}
    return all(isinstance(given.get(key), str | None) for key in ("remote_engine_id", "remote_request_id"))


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """An id that is a list. Wrong is a TypeError."""
    connector = SimpleNamespace(_heartbeat_by_engine={}, _heartbeat_req_engine={})
    params = {
        "do_remote_prefill": True, "remote_engine_id": [], "remote_request_id": "r", "remote_host": "p",
        "remote_port": 1, "tp_size": 1,
    }  # fmt: skip
    return stubs.raises(TypeError, hook, connector, stubs.request(8, kv_transfer_params=params))


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(NIXL_BASE_SCHEDULER.on_new_request(broken=">=0.32", probe=shows_bug, fix=fix),),
    evidence={"KVR011": r"TypeError: (unhashable type|cannot use 'list')"},
    scenarios=("nixl-odd-engine-id",),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
)
