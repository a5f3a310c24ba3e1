"""EngineCore dies at one request: NixlPushConnector promises tokens without knowing which engine pushes them.

Symptom: EngineCore of the decode engine dies in `update_state_after_alloc` or `build_connector_meta`. The error is a
`KeyError` for a key of `kv_transfer_params`, for example `KeyError: 'remote_engine_id'`. Or the worker of the decode
engine dies with `TypeError`.

Cause: The router or any client can set `kv_transfer_params`. If these parameters ask for a remote prefill,
get_num_new_matched_tokens promises the whole prompt (push_scheduler.py 0.32.0:122). After the allocation of the blocks,
update_state_after_alloc reads the prefill engine's address from the parameters without a check (:184-187). Later
build_connector_meta reads `remote_request_id` without a check (metadata.py 0.32.0:334).

Fix: If a needed parameter is missing or has a wrong type, the fix promises 0 tokens. The request computes its prompt.
- Remove when: vLLM checks the parameters before it promises tokens.
"""

from kvfix.fixes import _nixl, _prefills
from kvfix.fixes.api import NIXL_PUSH_SCHEDULER, PRIVATE, Any, Fix, stubs

#: The parameters that a remote prefill needs, and the type of each parameter. vLLM reads the parameters in
#: update_state_after_alloc, in build_connector_meta and in the handshake.
_TYPES = {
    "remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int, "tp_size": int,
}  # fmt: skip


@_prefills.promise_if
def fix(connector: Any, request: Any) -> bool:
    params = request.kv_transfer_params
    named = all(isinstance(params.get(key), kind) for key, kind in _TYPES.items())
    return named and isinstance(params.get("pp_size", 1), int)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up a request for a remote prefill on an unnamed peer. With the bug, the hook promises tokens."""
    return bool(hook(_nixl.scheduler_side(), stubs.request(32, kv_transfer_params={"do_remote_prefill": True}), 0)[0])


FIX = Fix(
    NIXL_PUSH_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", probe=shows_bug, fix=fix),
    effect="crash",
    evidence={"KVR011": r"^(update_state_after_alloc|schedule|build_connector_meta): KeyError"},
    no_patch=PRIVATE,
)
