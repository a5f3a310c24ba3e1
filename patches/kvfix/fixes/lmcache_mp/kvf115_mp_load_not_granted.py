"""EngineCore dies: LMCache starts a load for a request that vLLM computes itself, into blocks that are in use.

Symptom: EngineCore dies with a bare `AssertionError` at `assert RequestStatus.is_finished(req.status)` in
`_update_from_kv_xfer_finished`. The crash needs a hit, and either `prompt_logprobs` (vLLM then reads no cache) or a
MultiConnector that has chosen another connector.

Cause: `update_state_after_alloc` starts a load if LMCache's hit is longer than vLLM's hit (lmcache_mp_connector.py
0.5.4:868), even if vLLM takes 0 tokens of LMCache's hit (`num_external_tokens`).

Fix: If vLLM takes 0 tokens, the fix sets vLLM's own hit to at least LMCache's hit while `update_state_after_alloc`
runs. The function then releases all chunks that the lookup has locked, and starts no load.
- Upstream: https://github.com/LMCache/LMCache/issues/4355, fixed in 0.5.5.
- Remove when: LMCache 0.5.4 and LMCache's connectors for older vLLM are no longer in use.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import GO_ON, Any, Fix, Steps, fix_around, multi_process, note, stubs


def _without_hit(connector: Any, request: Any, blocks: Any, num_external_tokens: int, *_: Any, **__: Any) -> Any:
    tracker = connector.request_trackers.get(request.request_id)
    if tracker is not None and not num_external_tokens:
        tracker.num_lmcache_hit_tokens = tracker.num_lmcache_hit_blocks = 0
    return GO_ON


@fix_around(
    when=lambda impl, request, blocks, granted, *_, **__: not granted and _mp.is_in(impl, request, "PREFETCHING"),
    on_fault=_without_hit,
)
def fix(connector: Any, request: Any, blocks: Any, num_external_tokens: int) -> Steps:
    tracker, size = connector.request_trackers[request.request_id], _mp.block_size(connector)
    in_vllm, found = _mp.hits(connector, tracker)
    _mp.set_tokens(tracker, "num_vllm_hit", max(in_vllm, found), size)
    note(__name__, f"request {request.request_id}: vLLM takes no token of LMCache's hit, so no load starts")
    try:
        return (yield)
    finally:
        _mp.set_tokens(tracker, "num_vllm_hit", in_vllm, size)


def shows_bug(hook: Any, module: Any) -> bool:
    """Let vLLM take 0 of 512 found tokens. With the bug, the request waits for a load."""
    request = stubs.request(2048)
    connector, tracker = _mp.tracked(module, request, num_lmcache_hit=512)
    hook(connector, request, _mp.BLOCKS, 0)
    return bool(tracker.state.name == "WAITING_FOR_LOAD")


FIX = Fix(
    *multi_process("update_state_after_alloc", shows_bug, fix, lmcache=">=0.4.5,<=0.5.4", vllm="", order=2),
    effect="crash",
    evidence={"KVD111": "", "KVR004": ""},
)
