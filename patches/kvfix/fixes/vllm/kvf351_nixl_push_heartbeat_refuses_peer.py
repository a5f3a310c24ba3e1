"""Loads fail in push mode: NixlPushConnector's heartbeat refuses a prefill engine that has more ranks than KV heads.

## Symptom
In push mode, where the prefill engine has more ranks than the decode engine and than the model has KV heads: `NIXL
transfer failure: handshake_setup_failed` with `AssertionError` in `_validate_remote_agent_handshake` for each
heartbeat, and `push_reg_handshake_failed` for requests that come meanwhile; their loads fail. Leases of requests that
wait for blocks are not renewed.

## Cause
A decode engine that is pushed to reads nothing of its peer, and its registrations need no more than the peer's agents.
A heartbeat that comes first makes the whole handshake of one that reads (base_worker.py 0.32.0:3192), whose check
refuses ranks that have a copy of a head (:2450). A registration joins a handshake that is in flight, whichever it is
(:1290).

## Fix
Where that check would refuse the peer, the handshake of a heartbeat asks for its agents alone, as that of a
registration.

## Releases
vLLM 0.32.0, the first one played, and 0.33.0.

## Upstream
None known.

## Remove when
Heartbeats of push mode make the handshake that registrations make.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_BASE_WORKER
from kvfix.wrapping import around, replaced


def fix(module: ModuleType) -> Callable[..., Any]:
    def _send_heartbeats(worker: Any, metadata: Any) -> Generator[Any, Any, Any]:
        ensure = worker._ensure_handshake

        def agents_alone(
            engine: str, host: str, port: int, ranks: int, dcp: int = 1, pp: int = 1, only: bool = False
        ) -> Any:
            return ensure(engine, host, port, ranks, dcp, pp, only or _is_refused(worker, ranks))

        note(__name__, "a heartbeat connects to the agents alone")
        with replaced(worker, _ensure_handshake=agents_alone):
            answer = yield
        return answer

    return around(
        _send_heartbeats,
        when=lambda worker, metadata: (
            worker._TRANSFER_MODE == "push"
            and any(_is_refused(worker, info.tp_size) for info in metadata.heartbeat_by_engine.values())
        ),
    )


def _is_refused(worker: Any, ranks: int) -> bool:
    """Whether the check for reads refuses a peer of so many ranks."""
    heads = worker.transfer_topo.total_num_kv_heads
    return bool(ranks > worker.world_size and ranks > heads and not worker.use_mla and not worker._has_mamba)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A peer with two ranks that share a head. Wrong is a handshake as for reads."""
    asked: list[bool] = []

    def ensures(*arguments: Any) -> Any:
        asked.append(arguments[6])
        return asked

    peer = SimpleNamespace(host="p", port=1, tp_size=2, dcp_size=1, pp_size=1, req_ids={stubs.NAME})
    worker = SimpleNamespace(
        _TRANSFER_MODE="push", world_size=1, use_mla=False, _has_mamba=False, _hb_handshake_notif_only=True,
        transfer_topo=SimpleNamespace(total_num_kv_heads=1), _ensure_handshake=ensures, _recving_metadata={},
        _remote_agents={},
    )  # fmt: skip
    hook(worker, SimpleNamespace(heartbeat_by_engine={"p": peer}))
    return not asked[0]


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(NIXL_BASE_WORKER._send_heartbeats(broken=">=0.32", place=1, probe=shows_bug, fix=fix),),
    evidence={},
    scenarios=("nixl-push-heartbeat-refuses-peer",),
)
