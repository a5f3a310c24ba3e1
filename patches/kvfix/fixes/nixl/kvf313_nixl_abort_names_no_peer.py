"""The decode engine dies when a request is aborted before it is scheduled, and its parameters lack a key of the peer.

## Symptom
EngineCore of the decode engine dies with `KeyError: 'remote_request_id'`, or another key of `kv_transfer_params`, in
`build_connector_meta`.

## Cause
If a request ends before it was scheduled, NixlConnector sends a notice to the prefill engine, so that the prefill
engine frees the blocks. For this notice, request_finished adds the request to the list of requests that receive KV
(pull_scheduler.py 0.32.0:243). In the next step add_new_req_to_recv reads the peer's address from the request's
parameters without a check (metadata.py 0.32.0:330).

## Fix
Before build_connector_meta, the fix removes a request without a peer from this list. No peer waits for a notice
about it.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

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
from kvfix.fixes.targets import NIXL_BASE_SCHEDULER
from kvfix.wrapping import before

_KEYS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def fix(module: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(connector: Any, *_: Any) -> None:
        waiting = connector._reqs_need_recv
        for name in [name for name, entry in waiting.items() if not _names_peer(entry[0].kv_transfer_params)]:
            note(__name__, f"request {name} names no peer")
            del waiting[name]

    return before(build_connector_meta, when=lambda connector, *_, **__: connector._reqs_need_recv)


def _names_peer(params: Any) -> bool:
    return all(key in params for key in _KEYS)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """An aborted request that names no peer. Wrong is a KeyError."""
    connector = SimpleNamespace(
        _reqs_need_recv={stubs.NAME: (stubs.request(8, kv_transfer_params={}), [], (), False)}, use_host_buffer=False,
        _reqs_need_send={}, _reqs_in_batch=set(), _reqs_not_processed=set(), _heartbeat_by_engine={},
    )  # fmt: skip
    return stubs.raises(KeyError, hook, connector, SimpleNamespace())


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(NIXL_BASE_SCHEDULER.build_connector_meta(broken=">=0.32", probe=shows_bug, fix=fix),),
    evidence={"KVR011": r"KeyError: 'remote_"},
    scenarios=("nixl-abort-names-no-peer",),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
)
