"""Loads fail in push mode: NixlPushConnector's heartbeat refuses a prefill engine that has more ranks than KV heads.

Symptom: The bug needs push mode. The prefill engine has more ranks than the decode engine, and more ranks than the
model has KV heads. Each heartbeat logs `NIXL transfer failure: handshake_setup_failed` with `AssertionError` in
`_validate_remote_agent_handshake`. If a request arrives during a heartbeat's handshake, decode logs
`push_reg_handshake_failed`, and the request's load fails. Decode does not renew the leases of requests that wait for
blocks.

Cause: In push mode a decode engine reads nothing from its peer. So its registrations need only the peer's NIXL agents.
But a heartbeat starts the complete handshake, which is needed only to read KV (base_worker.py 0.32.0:3192). The
handshake refuses a peer whose ranks share a KV head (:2450). A registration that waits for this handshake (:1290) fails
too.

Fix: If the complete handshake would refuse the peer, a heartbeat asks only for the peer's agents, like a registration.
- Remove when: Heartbeats of push mode make the same handshake as registrations.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_BASE_WORKER, Any, Fix, Steps, fix_around, note, replaced, stubs


@fix_around(when=lambda worker, metadata: worker._TRANSFER_MODE == "push")
def fix(worker: Any, metadata: Any) -> Steps:
    if not any(_is_refused(worker, info.tp_size) for info in metadata.heartbeat_by_engine.values()):
        return (yield)
    ensure = worker._ensure_handshake

    def agents(engine: str, host: str, port: int, ranks: int, dcp: int = 1, pp: int = 1, only: bool = False) -> Any:
        return ensure(engine, host, port, ranks, dcp, pp, only or _is_refused(worker, ranks))

    note(__name__, "a heartbeat connects only to the agents of its peer")
    with replaced(worker, _ensure_handshake=agents):
        return (yield)


def _is_refused(worker: Any, ranks: int) -> bool:
    heads = worker.transfer_topo.total_num_kv_heads
    return bool(ranks > worker.world_size and ranks > heads and not worker.use_mla and not worker._has_mamba)


def shows_bug(hook: Any, module: Any) -> bool:
    """Send a heartbeat to a peer whose two ranks share a head. The bug starts the complete handshake."""
    ensures = stubs.Calls("pending")
    peer = stubs.Stub(host="p", port=1, tp_size=2, dcp_size=1, pp_size=1, req_ids={stubs.NAME})
    worker = _nixl.worker_side(
        _TRANSFER_MODE="push", _hb_handshake_notif_only=True, _ensure_handshake=ensures,
        transfer_topo=stubs.Stub(total_num_kv_heads=1),
    )  # fmt: skip
    hook(worker, stubs.Stub(heartbeat_by_engine={"p": peer}))
    return not ensures[0][0][6]


FIX = Fix(NIXL_BASE_WORKER._send_heartbeats(broken=">=0.32", order=1, probe=shows_bug, fix=fix), effect="hang")
