"""Hits return wrong text after a failed load: LMCache stores blocks whose KV was never computed.

Symptom: Only `Recovered from KV load failure: 1 request(s) rescheduled` is logged. Later, every request that hits a
chunk with uncomputed KV returns wrong text, until the chunk is evicted.

Cause: The tracker estimates the number of computed tokens (lmcache_mp_metadata.py 0.5.6:273). The estimate is the
larger hit (vLLM's or LMCache's) plus the tokens that were scheduled since the lookup. For example, vLLM has a hit of 64
tokens, and LMCache has a hit of 128. The load fails and vLLM continues at token 64, but the tracker counts from 128.
When vLLM has computed 144 tokens, the estimate is 208. LMCache then stores the tokens 128 to 192.

Fix: The fix acts before `build_connector_meta`, on a request that is scheduled for the first time since its lookup. If
the request has fewer computed tokens than the larger hit, the fix makes the tracker count from the computed tokens.
LMCache then also stores the tokens of the hit that were not loaded.
- Remove when: The connector tells the tracker that a load has failed.
"""

from kvfix.fixes import _closed, _mp
from kvfix.fixes.api import Any, Fix, fix_before, multi_process, note, stubs


@fix_before(
    when=lambda connector, scheduler_output, *_, **__: (
        scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids
    ),
    on_fault=_closed.store_nothing_more,
)
def fix(connector: Any, scheduler_output: Any) -> None:
    trackers = connector.request_trackers
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id in trackers and any(_mp.hits(connector, trackers[new.req_id])):
            _count_from(connector, trackers[new.req_id], new.num_computed_tokens)
    cached = scheduler_output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
            if name in cached.resumed_req_ids and name in trackers:
                _count_from(connector, trackers[name], computed)


def _count_from(connector: Any, tracker: Any, computed: int) -> None:
    hits = _mp.hits(connector, tracker)
    if tracker.num_scheduled_tokens or computed >= max(hits):
        return
    if computed == max(hits) - 1 == len(tracker.all_token_ids) - 1:
        return  # vLLM recomputes the last token of a full hit
    note(__name__, f"{computed} tokens are computed, not {max(hits)}")
    size, chunk = _mp.block_size(connector), _mp.chunk_size(connector)
    for name, found in zip(("num_vllm_hit", "num_lmcache_hit"), hits, strict=True):
        _mp.set_tokens(tracker, name, min(found, computed), size)
    stored = min(_mp.tokens(tracker, "num_stored", size), computed // chunk * chunk)
    _mp.set_tokens(tracker, "num_stored", stored, size)


def shows_bug(hook: Any, module: Any) -> bool:
    """Let a load of the tokens 256 to 1024 fail, and schedule 1024 tokens. With the bug, a store passes token 1280."""
    counts = {"num_vllm_hit": 256, "num_lmcache_hit": 1024, "num_stored": 1024}
    connector, tracker = _mp.tracked(module, stubs.request(4096), **counts)
    tracker.state = module.LMCacheMPRequestState.READY
    blocks = list(range(256))
    tracker.append_block_ids((blocks,) if isinstance(tracker.allocated_block_ids, dict) else blocks)
    metadata = hook(connector, stubs.step(1024, new=stubs.Stub(req_id=stubs.NAME, num_computed_tokens=256)))
    return any(each.direction == "STORE" and each.op.end > 1280 for each in metadata.requests)


FIX = Fix(
    *multi_process("build_connector_meta", shows_bug, fix, order=3),
    effect="wrong output",
    evidence={"KVR008": ""},
    scenarios=("mp-failed-load-stores-ahead", "mp-failed-load-stores-ahead-in-tree"),
)
