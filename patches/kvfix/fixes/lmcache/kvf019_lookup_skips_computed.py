"""A load returns fewer tokens than promised: LMCache counts tokens of vLLM's prefix cache as its own.

Symptom: The log has `Num retrieved tokens: 0, num expected tokens: ...`. With kv_load_failure_policy "fail" the request
ends with an error. LMCache never stores some chunks, so hits end before these chunks.

Cause: The lookup skips the chunks that vLLM has computed and adds their tokens to the hit (0.3.11
lmcache_lookup_client.py:190-243). LMCache may lack these chunks. The client caches this hit for the next lookup of the
request. Before that lookup, vLLM may evict the computed tokens. LMCache also counts all tokens of this hit as stored.

Fix: With the fix, the lookup asks for all chunks, as in earlier and later releases.
- Releases: LMCache 0.3.10.post2 and 0.3.11.
- Remove when: LMCache 0.3.11 is no longer in use.
"""

from kvfix.fixes import _closed
from kvfix.fixes.api import BYPASS_LOOKUP_CLIENT, LOOKUP_CLIENT, Any, Fix, Steps, fix_around, stubs


@fix_around(on_fault=_closed.no_hit)
def fix(client: Any, token_ids: Any, lookup_id: str, request_configs: Any = None, computed: int = 0) -> Steps:
    return (yield (token_ids, lookup_id, request_configs, 0))


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up 512 tokens that vLLM has computed. With the bug, the client promises all 512, and asks no worker."""
    ask = stubs.Calls(0)
    keys = stubs.Stub(process_tokens=lambda *_, **__: [(0, 256, 1), (256, 512, 2)])
    socket = stubs.Stub(send_multipart=ask, recv=lambda: bytes(8))
    client = stubs.Stub(
        enable_blending=False, token_database=keys, encoder=stubs.Stub(encode=lambda part: b""), num_ranks=1,
        sockets=[socket], lmcache_engine=stubs.Stub(lookup=ask), reqs_status={},
    )  # fmt: skip
    hook(client, [0] * 512, stubs.NAME, None, 512)
    return not ask


FIX = Fix(
    LOOKUP_CLIENT.lookup(broken=">=0.3.10.post2,<0.3.12", probe=shows_bug, fix=fix, order=2),
    BYPASS_LOOKUP_CLIENT.lookup(broken=">=0.3.10.post2,<0.3.12", probe=shows_bug, fix=fix),
    effect="lost hits",
    evidence={"KVD302": ""},
    # With the fix, each lookup also asks for computed chunks. So the fix also changes runs without errors.
    changes_healthy=("v1",),
)
