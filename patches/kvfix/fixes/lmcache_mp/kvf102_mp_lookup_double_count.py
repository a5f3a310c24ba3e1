"""The chunks right after a prompt's hit are never stored: each lookup of a waiting request adds the hit again.

Symptom: No error is logged. Whenever a request repeats a prompt, the external hit ends at the same token as before. The
chunks right after this token are never stored, but later chunks are. The bug occurs if a request waits for blocks.
Also, if LMCache has no hit but vLLM has a prefix hit, the stores of the prompt end too early.

Cause: vLLM calls `get_num_new_matched_tokens` in every step in which the request waits. Each call adds the hit to
`num_stored_tokens` (lmcache_mp_connector.py 0.5.5:1065; `num_stored_blocks` in vLLM's copy). After three calls with a
hit of 512 tokens, the first store begins at token 1536. Without a hit in LMCache, the call does not record the number
of tokens that vLLM has computed (0.5.5:1060). If vLLM has computed N tokens, the stores then end N tokens too early.

Fix: Until vLLM admits the request, the fix sets the number of stored tokens to LMCache's hit after each call. The fix
also records the number of tokens that vLLM has computed.
- Upstream: https://github.com/LMCache/LMCache/issues/4508, fixed in 0.5.6, and open in vLLM's copy.
- Remove when: LMCache 0.5.5 is no longer in use, and vLLM's copy assigns the hit instead of adding it.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, Fix, fix_after, multi_process, stubs


@fix_after(when=lambda impl, answer, request, *_: answer[0] is not None and _mp.is_in(impl, request, "PREFETCHING"))
def fix(connector: Any, answer: Any, request: Any, num_computed_tokens: int) -> None:
    tracker, size = connector.request_trackers[request.request_id], _mp.block_size(connector)
    aligned = getattr(connector, "_hit_alignment_tokens", size)
    _mp.set_tokens(tracker, "num_stored", _mp.tokens(tracker, "num_lmcache_hit", size), size)
    _mp.set_tokens(tracker, "num_vllm_hit", num_computed_tokens // aligned * aligned, size)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up a hit of 512 tokens twice, then a miss with 1024 computed tokens. With the bug, one count is wrong."""
    request = stubs.request(2048)
    connector = _mp.scheduler_side(module, found=512)
    for _ in range(2):
        hook(connector, request, 0)
    stored = _mp.tokens(connector.request_trackers[request.request_id], "num_stored")
    missed = _mp.scheduler_side(module, found=0)
    hook(missed, request, 1024)
    return stored != 512 or _mp.tokens(missed.request_trackers[request.request_id], "num_vllm_hit") != 1024


FIX = Fix(
    *multi_process("get_num_new_matched_tokens", shows_bug, fix, lmcache=">=0.4.5,<=0.5.5", order=1),
    effect="lost hits",
    evidence={"KVR007": ""},
    scenarios=(
        "mp-apc-hit-not-stored", "mp-apc-hit-not-stored-in-tree",
        "mp-lookup-double-count", "mp-lookup-double-count-in-tree",
    ),
    # Without the fix, vLLM's copy stores too few tokens after a miss if vLLM itself has a prefix hit.
    changes_healthy=("mp-in-tree",),
)  # fmt: skip
