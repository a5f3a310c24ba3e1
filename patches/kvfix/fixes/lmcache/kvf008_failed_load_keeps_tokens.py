"""The worker dies after a failed load: LMCache's tracker keeps tokens that vLLM has rolled back.

Symptom: The engine dies with a bare `AssertionError` at `assert len(slot_mapping) == len(token_ids)` in
`wait_for_save`. Before this error, the log has `Request ... failed to load 1024 tokens across 64 blocks` and `The
number of retrieved tokens is less than the expected number of tokens! This should not happen!`.

Cause: When a load fails, vLLM rolls the request back to its last good token. But LMCache's tracker keeps all tokens of
the request, and appends the tokens of the next step. The tracker then has more tokens than the request has slots.

Fix: Before each step, the fix looks for trackers with more tokens than vLLM has computed. The fix removes the extra
tokens, and marks the remaining tokens as not saved. LMCache then saves these tokens again, and skips cached chunks.
- Upstream: https://github.com/LMCache/LMCache/issues/2294, https://github.com/LMCache/LMCache/pull/2516 (in 0.4.1).
"""

from kvfix.fixes import _closed
from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_before, note, stubs


@fix_before(on_fault=_closed.save_nothing_more)
def fix(impl: Any, scheduler_output: Any) -> None:
    cached = scheduler_output.scheduled_cached_reqs
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
        tracker = impl._request_trackers[name]
        if computed < len(tracker.token_ids):
            tracker.token_ids = list(impl._unfinished_requests[name].all_token_ids[:computed])
            tracker.num_saved_tokens = 0
            note(__name__, f"request {name} was rolled back to {computed} tokens")


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Roll back 512 tokens to 256, and compute 16 more. With the bug, the tracker has 528 tokens instead of 272."""
    impl, tracker = stubs.scheduled(adapter, 900, tracked=512, computed=256)
    hook(impl, stubs.step(16, computed=256))
    return len(tracker.token_ids) != 272


FIX = Fix(
    LMCACHE_V1.build_connector_meta(broken=">=0.3.9,<0.4.1", probe=shows_bug, fix=fix, order=4),
    effect="crash",
    evidence={"KVD112": "", "KVD302": "", "KVD1090": "", "KVR008": "", "KVR011": "^wait_for_save: AssertionError"},
    scenarios=("retrieve-fail-slot-mismatch",),
)
