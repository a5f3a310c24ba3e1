"""EngineCore dies when `disagg_spec` of a request names a decoder without the decoder's complete address.

Symptom: EngineCore dies with `KeyError: 'receiver_host'`, or another key, in `update_state_after_alloc`. If
`disagg_spec` is a string instead of a dictionary, the error is `TypeError: string indices must be integers`.

Cause: `disagg_spec` comes from the client, in the `kv_transfer_params` of its request. When vLLM allocates the
request's blocks, LMCache reads four keys of `disagg_spec` without a check (0.5.6 vllm_v1_adapter.py:1560-1574).

Fix: If `disagg_spec` lacks a key or is no dictionary, the request runs without a decoder, and kvfix logs one warning.
- Remove when: `update_state_after_alloc` checks whether `disagg_spec` is complete.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, View, engine_log, fix_around, stubs

_SPEC = "disagg_spec"
_KEYS = ("req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port")


def _in_part(impl: Any, request: Any, *_: Any, **__: Any) -> bool:
    params = getattr(request, "kv_transfer_params", None)
    if not params or _SPEC not in params:
        return False
    spec = params[_SPEC]
    return not isinstance(spec, dict) or any(k not in spec for k in _KEYS) or not isinstance(spec["receiver_host"], str)


@fix_around(when=_in_part)
def fix(impl: Any, request: Any, num_external_tokens: int) -> Steps:
    engine_log.warning("KVF035: a `disagg_spec` lacks a complete decoder address. The request runs without a decoder")
    others = {name: value for name, value in request.kv_transfer_params.items() if name != _SPEC}
    yield View(request, kv_transfer_params=others), num_external_tokens
    if request.request_id in impl._unfinished_requests:  # replace the View that the hook has stored
        impl._unfinished_requests[request.request_id] = request


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Allocate blocks for a request whose `disagg_spec` is empty. The bug raises KeyError."""
    impl = stubs.scheduler_side(lookup_client=stubs.Nothing())
    return stubs.raises(KeyError, hook, impl, stubs.request(16, kv_transfer_params={_SPEC: {}}), 0)


FIX = Fix(
    LMCACHE_V1.update_state_after_alloc(broken=">=0.3.9", probe=shows_bug, fix=fix),
    effect="crash",
    evidence={"KVR011": "KeyError: '(req_id|receiver_)"},
)
