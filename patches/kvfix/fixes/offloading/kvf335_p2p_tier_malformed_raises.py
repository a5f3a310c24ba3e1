"""EngineCore dies when the parameters of a request describe the peer of OffloadingConnector's p2p tier in a wrong form.

Symptom: EngineCore dies with `AttributeError: ... object has no attribute 'get'` or `TypeError: unhashable type` in
tiering/p2p/manager.py. The bug needs `TieringOffloadingSpec` with a secondary tier of type `p2p`. Any client that can
reach the engine can cause the crash, because the parameters of a request describe the peer.

Cause: In the parameters, the tier expects dictionaries such as `remote_decoder`, each with a string `kv_request_id`.
The tier does not check the types (tiering/p2p/manager.py 0.32.0:78-168), and uses `kv_request_id` as a dict key in the
lookup and when the request ends (:392, :467). The scheduler catches no error.

Fix: The fix ignores malformed values. If the tier then has no peer to load from, this engine computes the KV.
- Remove when: `_parse_source` and `_parse_dest` check the form of the values.
"""

from kvfix.fixes.api import OFFLOADING_P2P, PRIVATE, Any, Fix, Steps, engine_log, fix_around, note, replaced, stubs

_ROLES = ("remote_prefiller", "remote_kv_source", "remote_decoder")


def _has_form(role: Any) -> bool:
    return role is None or (isinstance(role, dict) and not isinstance(role.get("kv_request_id"), (dict, list)))


def _malformed(params: Any) -> bool:
    return bool(params) and not (isinstance(params, dict) and all(_has_form(params.get(role)) for role in _ROLES))


@fix_around(when=lambda tier, context, *_, **__: _malformed(context.kv_transfer_params))
def on_new_request(tier: Any, context: Any) -> Steps:
    params = context.kv_transfer_params
    engine_log.warning("KVF335: ignored malformed kv_transfer_params of a request for the p2p tier")
    note(__name__, "malformed parameters of a request were ignored")
    known = {}
    if isinstance(params, dict):
        known = {key: value for key, value in params.items() if key not in _ROLES or _has_form(value)}
    with replaced(context, kv_transfer_params=known):
        return (yield)


def shows_bug(hook: Any, module: Any) -> bool:
    """Start a request whose peer is a number. The bug raises AttributeError."""
    context = stubs.Stub(kv_transfer_params={"remote_decoder": 1}, req_id=stubs.NAME, set_state=id, get_state={}.get)
    return stubs.raises(AttributeError, hook, stubs.Stub(), context)


FIX = Fix(
    OFFLOADING_P2P.on_new_request(broken=">=0.32", probe=shows_bug, fix=on_new_request),
    effect="crash",
    evidence={"KVR011": r"^(add_request|on_new_request): AttributeError: .* has no attribute 'get'"},
    proof="tests/lab/test_offloading.py, because the lab has no p2p tier",
    no_patch=PRIVATE,
)
