"""All loads from one prefill engine fail until a restart: NixlConnector remembers the wrong rank count of one request.

Symptom: After a request with a wrong `tp_size`, all loads from a prefill engine fail with `NIXL transfer failure:
handshake_setup_failed` and `AssertionError` in `_validate_remote_agent_handshake`. The error repeats for each request,
although the request's parameters are right. Without the fix, the errors end only when the decode engine restarts.

Cause: `tp_size` comes from a request's parameters. `add_remote_agent` first stores this value for the peer, and checks
the value afterwards (base_worker.py 0.32.0:2254). `register_remote_engine` never replaces the stored value (utils.py
0.32.0:467). Each later handshake compares the right `tp_size` with the stored value (base_worker.py 0.32.0:2425).

Fix: If the check refuses the peer, the fix deletes the stored values of the peer.
- Remove when: vLLM stores nothing about a peer that it has refused.
"""

from contextlib import suppress

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_BASE_WORKER, PRIVATE, Any, Fix, Steps, fix_around, note, stubs


@fix_around()
def fix(worker: Any, metadata: Any, *_: Any) -> Steps:
    try:
        return (yield)
    except GeneratorExit:  # the function has raised
        if metadata.engine_id not in worker._remote_agents:
            note(__name__, f"the stored values of a refused peer are deleted: {metadata.engine_id}")
            worker.transfer_topo.unregister_remote_engine(metadata.engine_id)
        raise


def shows_bug(hook: Any, module: Any) -> bool:
    """Refuse a peer. With the bug, the worker keeps the number of ranks of this peer."""
    kept: set[str] = set()
    topo = stubs.Stub(
        tp_size=1, register_remote_engine=lambda engine, _: kept.add(engine), unregister_remote_engine=kept.discard,
        describe=lambda *_: 1 // 0,
    )  # fmt: skip
    worker = _nixl.worker_side(
        transfer_topo=topo, block_len_per_layer=[1], _transfer_layer_region_indices=(), _packed_member_layouts={}
    )
    metadata = stubs.Stub(
        engine_id=stubs.NAME, physical_blocks_per_logical_kv_block=1, block_size=16, block_lens=[1],
        kv_caches_base_addr=[1], packed_member_layouts={},
    )  # fmt: skip
    with suppress(ZeroDivisionError):
        hook(worker, metadata, 0, 2)
    return stubs.NAME in kept


FIX = Fix(NIXL_BASE_WORKER.add_remote_agent(broken=">=0.32", probe=shows_bug, fix=fix), effect="hang", no_patch=PRIVATE)
