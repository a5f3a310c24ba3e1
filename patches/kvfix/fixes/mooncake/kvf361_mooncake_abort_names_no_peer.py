"""The decode engine dies when a request without a peer is aborted before it is scheduled (MooncakeConnector).

## Symptom
EngineCore of the decode engine dies with `KeyError: 'remote_engine_id'`, `KeyError: 'remote_bootstrap_addr'` or
`TypeError: unhashable type` in `build_connector_meta`.

## Cause
If a request ends before it was scheduled, MooncakeConnector lets the prefill engine free its blocks. For this,
request_finished adds the request to the list of requests that wait for KV (mooncake_connector.py 0.32.0:1096). The next
step reads the peer from the request's parameters without a check (:693).

## Fix
Before build_connector_meta, the fix removes a request without a peer from this list. No peer waits for a notice
about it.

## Releases
vLLM 0.20 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM checks whether the parameters name a peer before it sends the notice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import MOONCAKE_SCHEDULER
from kvfix.wrapping import before

_KEYS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


def fix(module: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(connector: Any, *_: Any) -> None:
        waiting = connector._reqs_need_recv
        for name in [name for name, entry in waiting.items() if not _names_peer(entry[0].kv_transfer_params)]:
            note(__name__, f"request {name} names no peer")
            del waiting[name]

    return before(build_connector_meta, when=lambda connector, *_, **__: connector._reqs_need_recv)


def _names_peer(params: Any) -> bool:
    return all(isinstance(params.get(key), str) for key in _KEYS)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """An aborted request that names no peer. Wrong is a KeyError."""
    request = stubs.request(8, kv_transfer_params={"transfer_id": "t"})
    connector = SimpleNamespace(
        is_kv_producer=False, is_kv_consumer=True, _reqs_need_recv={stubs.NAME: (request, [])}, _reqs_need_send={}
    )
    return stubs.raises(KeyError, hook, connector, SimpleNamespace())


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(MOONCAKE_SCHEDULER.build_connector_meta(broken=">=0.20", probe=shows_bug, fix=fix),),
    evidence={"KVR011": r"KeyError: 'remote_(engine_id|bootstrap_addr)"},
    scenarios=("mooncake-abort-names-no-peer",),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
)
