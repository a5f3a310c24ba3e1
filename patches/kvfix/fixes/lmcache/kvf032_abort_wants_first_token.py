"""EngineCore dies when a request with `ret_first_tok` is aborted before its first token: LMCache reads an empty list.

Symptom: Prefill's EngineCore dies in `request_finished` with `IndexError: list index out of range`, in two cases:

- A proxy asks for the first token (`"kv_transfer_params": {"ret_first_tok": true}`) and disconnects during the prefill.
- The load of a request with `ret_first_tok` fails, with `kv_load_failure_policy=fail`.

Cause: `request_finished` returns `request._output_token_ids[0]` (0.5.6 vllm_v1_adapter.py:1926). The list may be empty.

Fix: If the request has generated no token, the fix hides `ret_first_tok` from `request_finished`.
- Remove when: `request_finished` checks whether the request has generated a token.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, View, fix_around, stubs

_ASKS = "ret_first_tok"


@fix_around(
    when=lambda impl, request, *_, **__: (
        request.kv_transfer_params and _ASKS in request.kv_transfer_params and not request._output_token_ids
    )
)
def fix(impl: Any, request: Any, block_ids: Any) -> Steps:
    others = {name: value for name, value in request.kv_transfer_params.items() if name != _ASKS}
    return (yield View(request, kv_transfer_params=others), block_ids)


def shows_bug(hook: Any, adapter: Any) -> bool:
    """End a request that asks for its first token and has no output. The bug raises IndexError."""
    request = stubs.request(16, kv_transfer_params={_ASKS: True}, _output_token_ids=[])
    return stubs.raises(IndexError, hook, stubs.scheduler_side(), request, [])


FIX = Fix(
    LMCACHE_V1.request_finished(broken=">=0.3.9", probe=shows_bug, fix=fix, order=3),
    effect="crash",
    evidence={"KVR011": "IndexError: list index out of range"},
)
