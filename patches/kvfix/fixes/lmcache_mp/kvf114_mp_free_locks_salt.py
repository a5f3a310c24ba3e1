"""Chunks stay locked until a timeout: LMCache releases the locks of a request with a `cache_salt` under another key.

Symptom: vLLM logs nothing. With `cache_salt`, the server keeps read locks on chunks that vLLM already has. Until the
read TTL (`read_ttl_seconds`, 300 s) ends, the server cannot evict these chunks. Requests without salt may lose locks.

Cause: `update_state_after_alloc` releases the locks of chunks that need no load, but does not pass the salt
(lmcache_mp_connector.py 0.5.0:1013). The salt is part of the key. So the server releases locks of chunks without salt.

Fix: While `update_state_after_alloc` runs, the fix passes the salt of the request to `free_lookup_locks`.
- Upstream: https://github.com/LMCache/LMCache/issues/3770, fixed in 0.5.1;
  https://github.com/vllm-project/vllm/pull/44097.
- Remove when: LMCache 0.5.4 (lmcache_mp_connector_0201) is no longer in use, and vLLM's copy passes the salt.
"""

import functools

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, Fix, Steps, fix_around, multi_process, note, replaced, stubs


@fix_around(when=lambda impl, request, *_: getattr(impl.request_trackers.get(request.request_id), "cache_salt", ""))
def fix(connector: Any, request: Any, blocks: Any, num_external_tokens: int) -> Steps:
    adapter, salt = connector.scheduler_adapter, connector.request_trackers[request.request_id].cache_salt
    note(__name__, f"request {request.request_id} has a salt")
    with replaced(adapter, free_lookup_locks=functools.partial(adapter.free_lookup_locks, cache_salt=salt)):
        return (yield)


def shows_bug(hook: Any, module: Any) -> bool:
    """Admit a request with a salt and a hit that vLLM already has. The bug frees the locks without the salt."""
    request = stubs.request(2048, cache_salt="tenant")
    connector, _ = _mp.tracked(module, request, num_vllm_hit=512, num_lmcache_hit=512)
    hook(connector, request, _mp.BLOCKS, 0)
    (asked,) = [more for name, _, more in connector.scheduler_adapter.asked if name == "free_lookup_locks"]
    return bool(asked.get("cache_salt") != "tenant")


FIX = Fix(
    *multi_process(
        "update_state_after_alloc", shows_bug, fix,
        lmcache=">=0.4.5,<=0.5.0", for_0201=">=0.4.5,<=0.5.4", for_0180="", order=1,
    ),
    effect="leak",
    evidence={"KVR009": "^read locks of the server "},
    scenarios=("mp-free-locks-salt", "mp-free-locks-salt-in-tree"),
)  # fmt: skip
