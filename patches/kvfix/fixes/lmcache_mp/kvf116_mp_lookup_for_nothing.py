"""Chunks stay locked until a timeout: LMCache looks up a request that reads no cache, and never releases the locks.

Symptom: vLLM logs nothing. Requests with `prompt_logprobs`, and some pooling requests, read no cache. The requests'
chunks stay read-locked in the server for the read TTL (`read_ttl_seconds`, 300 s). The server cannot evict the chunks.

Cause: vLLM asks the connector for the hit of every request. With `skip_reading_prefix_cache`, vLLM drops the answer
(scheduler.py 0.32.0:983). vLLM admits the request even if the lookup is still running. The connector then deletes the
lookup (lmcache_mp_connector.py 0.5.6:1433), and releases no lock, because the connector does not know the hit yet.

Fix: For a request that reads no cache, the fix sends no lookup and returns no hit. LMCache still stores the KV.
- Remove when: The connector sends no lookup for a request that reads no cache.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import LMCACHE_MP, Any, Fix, fix_before, multi_process, note


@fix_before(when=lambda connector, request, *_, **__: getattr(request, "skip_reading_prefix_cache", False))
def fix(connector: Any, request: Any, num_computed_tokens: int = 0) -> None:
    _mp.nothing_cached(connector.scheduler_adapter, request.request_id)
    note(__name__, f"request {request.request_id} reads no cache")


shows_bug, new_request_shows_bug = _mp.looks_up(skip_reading_prefix_cache=True)

FIX = Fix(
    *multi_process("get_num_new_matched_tokens", shows_bug, fix, order=4),
    LMCACHE_MP.on_new_request(broken=">=0.5.4,<=0.5.6", probe=new_request_shows_bug, fix=fix, order=2),
    effect="leak",
    evidence={"KVR009": "^read locks of the server "},
    scenarios=("mp-lookup-for-nothing", "mp-lookup-for-nothing-in-tree"),
)
