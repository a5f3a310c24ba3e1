"""The decode engine dies when a request is aborted before it is scheduled, and its parameters lack a key of the peer.

Symptom: EngineCore dies in `build_connector_meta` with `KeyError: 'remote_request_id'` or another key of the peer.

Cause: If a request ends before it was scheduled, request_finished adds the request to the list of receiving requests
(pull_scheduler.py 0.32.0:228). The worker tells prefill to free the blocks of listed requests. In the next step,
add_new_req_to_recv reads the peer's address from the request's parameters without a check (metadata.py 0.32.0:333).

Fix: Before build_connector_meta, the fix removes requests without a peer from the list of receiving requests.
- Remove when: vLLM checks whether the parameters name a peer before it adds a request to this list.
"""

from kvfix.fixes import _nixl, _prefills
from kvfix.fixes.api import NIXL_BASE_SCHEDULER, PRIVATE, Any, Fix, stubs

_KEYS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")

fix = _prefills.drop_peerless(__name__, lambda params: all(key in params for key in _KEYS))


def shows_bug(hook: Any, module: Any) -> bool:
    """Abort a request that names no peer. The bug raises KeyError."""
    waiting: dict[str, Any] = {stubs.NAME: (stubs.request(8, kv_transfer_params={}), [], (), False)}
    return stubs.raises(KeyError, hook, _nixl.scheduler_side(_reqs_need_recv=waiting), stubs.Stub())


FIX = Fix(
    NIXL_BASE_SCHEDULER.build_connector_meta(broken=">=0.32", probe=shows_bug, fix=fix),
    effect="crash",
    evidence={"KVR011": r"KeyError: 'remote_"},
    no_patch=PRIVATE,
)
