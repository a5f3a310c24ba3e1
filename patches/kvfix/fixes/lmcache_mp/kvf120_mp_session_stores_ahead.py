"""Hits on a streaming session return wrong text: LMCache stores chunks whose KV is not computed yet.

Symptom: Nothing is logged. With speculative decoding or asynchronous scheduling, requests that hit the stored KV of a
session (streaming input) return wrong text.

Cause: The tracker adds up the tokens of all steps (`num_scheduled_tokens`, lmcache_mp_metadata.py 0.5.6:273). The sum
includes rejected drafts, and the tokens in flight that vLLM drops at the end of a turn. While vLLM generates,
the sum does no harm, because LMCache stores no more tokens than the request has. When new input comes, the request has
many more tokens than vLLM has computed, and LMCache stores chunks that are not computed yet.

Fix: If a newly scheduled request already has a tracker, the fix sets the sum to the computed tokens minus the larger
hit (vLLM's or LMCache's).
- Releases: LMCache 0.4.5 to 0.5.5, and 0.5.6 with `lmcache.mp.save_decode_cache`; 0.4.4 to 0.5.5 with
  lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.33.0.
- Remove when: `_process_new_requests` sets the sum from `num_computed_tokens`.
"""

from kvfix.fixes import _closed, _mp
from kvfix.fixes.api import Any, Fix, fix_before, multi_process, note, stubs


@fix_before(when=lambda impl, output, *_, **__: output.scheduled_new_reqs, on_fault=_closed.store_nothing_more)
def fix(connector: Any, scheduler_output: Any, metadata: Any) -> None:
    for new in scheduler_output.scheduled_new_reqs:
        tracker = connector.request_trackers.get(new.req_id)
        if tracker is not None and tracker.num_scheduled_tokens:
            note(__name__, f"request {new.req_id} continues with {new.num_computed_tokens} computed tokens")
            tracker.num_scheduled_tokens = new.num_computed_tokens - max(_mp.hits(connector, tracker))


def shows_bug(hook: Any, module: Any) -> bool:
    """Schedule 16 tokens of a session with 100 computed tokens and a sum of 400. With the bug, the sum is then 416."""
    connector, tracker = _mp.tracked(module, stubs.request(2048))
    tracker.num_scheduled_tokens = 400
    new = stubs.Stub(req_id=stubs.NAME, num_computed_tokens=100)
    hook(connector, stubs.step(16, new=new), stubs.Stub(add_request_metadata=lambda meta: None))
    return bool(tracker.num_scheduled_tokens != 116)


FIX = Fix(
    *multi_process("_process_new_requests", shows_bug, fix, lmcache=">=0.4.5"),
    effect="wrong output",
    evidence={"KVR008": ""},
    scenarios=("mp-session-stores-ahead", "mp-session-stores-ahead-in-tree"),
)
