"""Preempted requests return wrong text: LMCache handles a resumed request like a running one, and stores wrong KV.

Symptom: Nothing is logged. Preempted requests, and other requests that begin with the same tokens, return wrong text.

Cause: For a resumed request, the connector promises the tokens that LMCache has. vLLM counts the promised tokens as
computed. But LMCache loads tokens only for new requests. The request's tracker keeps the old tokens and blocks, and
appends the tokens and blocks of the resume. The old blocks now belong to other requests. LMCache stores the KV of the
old blocks under the keys of the resumed request (0.3.9 vllm_v1_adapter.py, `build_connector_meta`).

Fix: The fix promises 0 tokens to a resumed request, and sets the tracker to vLLM's computed tokens and the new blocks.
"""

from kvfix.fixes import _closed
from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_around, fix_before, instead, note, stubs


@fix_around(on_fault=_closed.no_hit)
def fix_lookup(impl: Any, request: Any, num_computed_tokens: int) -> Any:
    return instead(0) if request.request_id in impl._request_trackers else None


@fix_before(on_fault=_closed.save_nothing_more)
def fix_metadata(impl: Any, scheduler_output: Any) -> None:
    for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
        tracker, request = impl._request_trackers[name], impl._unfinished_requests[name]
        tracker.token_ids = list(request.all_token_ids[: request.num_computed_tokens])
        tracker.allocated_block_ids = []
        note(__name__, f"request {name} is resumed")
        tracker.num_saved_tokens = 0


def lookup_shows_bug(hook: Any, adapter: Any) -> bool:
    """Look up a request that already has a tracker. The hook must return 0, because LMCache would load nothing."""
    impl = stubs.scheduler_side(lookup_client=stubs.lookup_client(256), _request_trackers={stubs.NAME: object()})
    return bool(hook(impl, stubs.request(300), 0) != 0)


def metadata_shows_bug(hook: Any, adapter: Any) -> bool:
    """Resume a request with 256 computed tokens in 20 new blocks. With the bug, the tracker also has the old blocks."""
    impl, tracker = stubs.scheduled(adapter, 900, tracked=512, computed=256)
    hook(impl, stubs.step(16, computed=256, blocks=list(range(40, 60)), resumed=True))
    return bool(tracker.allocated_block_ids != list(range(40, 60)))


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.3.9,<0.3.10", probe=lookup_shows_bug, fix=fix_lookup, order=4),
    LMCACHE_V1.build_connector_meta(broken=">=0.3.9,<0.3.10", probe=metadata_shows_bug, fix=fix_metadata, order=5),
    effect="wrong output",
    evidence={"KVR006": ""},
)
