"""After a failed load the store runs ahead of the compute: KV that nobody has computed is stored under valid keys.

## Symptom
Nothing in the log but `Recovered from KV load failure: 1 request(s) rescheduled`. Every later hit on the chunk is
wrong: wrong text for other requests with the same prompt, until the chunk is evicted.

## Cause
What is computed is counted as the larger of the two hits and what was scheduled since (lmcache_mp_metadata.py
0.5.6:275). vLLM had 64 tokens, the cache 128; the load fails and vLLM goes on at 64. The tracker still counts from 128,
so when 144 are computed it takes 208 for computed, and stores 128 to 192.

## Fix
Before `build_connector_meta`: a request that is scheduled for the first time since its lookup, with fewer tokens
computed than the hits that its tracker counts from, counts from what vLLM says. What of the hit was not loaded is
stored again: it may be gone.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
None known.

## Remove when
The tracker is told of a failed load.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import before
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(connector: Any, scheduler_output: Any) -> None:
        trackers = connector.request_trackers
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in trackers:
                _count_from(connector, trackers[new.req_id], new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
                if request_id in cached.resumed_req_ids and request_id in trackers:
                    _count_from(connector, trackers[request_id], computed)

    return before(
        build_connector_meta,
        when="scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_cached_reqs.resumed_req_ids",
    )


def _count_from(connector: Any, tracker: Any, computed: int) -> None:
    hits = _mp.hits(connector, tracker)
    if tracker.num_scheduled_tokens or computed >= max(hits):
        return
    if computed == max(hits) - 1 == len(tracker.all_token_ids) - 1:
        return  # the last token of a prompt that is hit whole is computed anew
    size, chunk = _mp.block_size(connector), _mp.chunk_size(connector)
    for name, found in zip(("num_vllm_hit", "num_lmcache_hit"), hits, strict=True):
        _mp.set_tokens(tracker, name, min(found, computed), size)
    stored = min(_mp.tokens(tracker, "num_stored", size), computed // chunk * chunk)
    _mp.set_tokens(tracker, "num_stored", stored, size)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """vLLM had 256 tokens, the cache 1024, the load failed; 1024 are scheduled, so 1280 will be computed."""
    connector, request = _mp.scheduler_side(module), _mp.request(4096)
    tracker = connector.request_trackers[request.request_id] = module.LMCacheMPRequestTracker(request)
    tracker.state = module.LMCacheMPRequestState.READY
    blocks = list(range(256))
    tracker.append_block_ids((blocks,) if isinstance(tracker.allocated_block_ids, dict) else blocks)
    for name, found in (("num_vllm_hit", 256), ("num_lmcache_hit", 1024), ("num_stored", 1024)):
        _mp.set_tokens(tracker, name, found)
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    new = SimpleNamespace(req_id=request.request_id, num_computed_tokens=256)
    metadata = hook(
        connector,
        SimpleNamespace(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: 1024},
            total_num_scheduled_tokens=1024,
            preempted_req_ids=set(),
        ),
    )
    return any(each.direction == "STORE" and each.op.end > 1280 for each in metadata.requests)


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches("build_connector_meta", shows_bug, correct, lmcache=">=0.4.5,<=0.5.6", vllm=">=0.26.0"),
)
