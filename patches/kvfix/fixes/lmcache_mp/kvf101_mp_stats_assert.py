"""EngineCore dies when a client asks for cache statistics and disconnects before its lookup.

Symptom: EngineCore dies with `AssertionError: Request tracker for request_id cmpl-... not found. ` in
`request_finished`. Any client can cause this crash with the key `cached_token_stats` in `kv_transfer_params`. In
LMCache 0.4.5 and in vLLM's copy of the connector, this key is `num_lmcache_extra_cached_tokens`.

Cause: `request_finished` reads the statistics from the request's tracker (lmcache_mp_connector.py 0.5.6:1552). The
first lookup (`get_num_new_matched_tokens`) creates the tracker. A request that ends before its lookup has no tracker.

Fix: If a request asks for statistics and has no tracker, the fix makes a tracker with zeros before `request_finished`.
- Upstream: https://github.com/vllm-project/vllm/pull/56780 (open).
- Remove when: `request_finished` no longer asserts that there is a tracker.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, Fix, Wrapper, before, multi_process, note, stubs

#: Keys with which a client asks for statistics. Each release knows one of these keys.
STATISTICS = ("cached_token_stats", "num_lmcache_extra_cached_tokens")


def fix(module: Any) -> Wrapper:
    make_tracker = module.LMCacheMPRequestTracker

    def track(connector: Any, request: Any, block_ids: Any) -> None:
        asked = request.kv_transfer_params
        if asked and any(name in asked for name in STATISTICS):
            note(__name__, f"request {request.request_id} has ended before its lookup")
            connector.request_trackers[request.request_id] = make_tracker(request)

    return before(track, when=lambda connector, request, *_, **__: request.request_id not in connector.request_trackers)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a request that asks for statistics and was never looked up. The bug raises AssertionError."""
    request = stubs.request(2048, kv_transfer_params=dict.fromkeys(STATISTICS, True))
    return stubs.raises(AssertionError, hook, _mp.scheduler_side(module), request, [])


FIX = Fix(
    *multi_process("request_finished", shows_bug, fix, for_0180="", order=1),
    effect="crash",
    evidence={"KVD110": "", "KVR011": "Request tracker for request_id"},
    scenarios=("mp-stats-assert", "mp-stats-assert-in-tree"),
)
