"""The decode engine dies when a request without a peer is aborted before it is scheduled (MooncakeConnector).

Symptom: EngineCore of the decode engine dies with `KeyError: 'remote_engine_id'`, `KeyError: 'remote_bootstrap_addr'`
or `TypeError: unhashable type` in `build_connector_meta`.

Cause: If a request ends before it was scheduled, MooncakeConnector must tell the prefill engine to free the blocks. So
request_finished adds the request to the list of requests that wait for KV (mooncake_connector.py 0.32.0:1141).
The next step reads the peer from the request's parameters without a check (:691).

Fix: Before build_connector_meta, the fix removes requests without a peer from the list of requests that wait for KV.
- Releases: vLLM 0.20.2 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: vLLM checks whether the parameters name a peer before it adds a request to this list.
"""

from kvfix.fixes import _mooncake, _prefills
from kvfix.fixes.api import MOONCAKE_SCHEDULER, PRIVATE, Any, Fix, stubs

fix = _prefills.drop_peerless(__name__, lambda params: all(isinstance(params.get(key), str) for key in _mooncake.PEER))


def shows_bug(hook: Any, module: Any) -> bool:
    """Abort a request that names no peer. The bug raises KeyError."""
    waiting: dict[str, Any] = {stubs.NAME: (stubs.request(8, kv_transfer_params={"transfer_id": "t"}), [])}
    return stubs.raises(KeyError, hook, _mooncake.scheduler_side("kv_consumer", _reqs_need_recv=waiting), stubs.Stub())


FIX = Fix(
    MOONCAKE_SCHEDULER.build_connector_meta(broken=">=0.20", probe=shows_bug, fix=fix),
    effect="crash",
    evidence={"KVR011": r"KeyError: 'remote_(engine_id|bootstrap_addr)"},
    no_patch=PRIVATE,
)
