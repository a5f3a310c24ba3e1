"""With asynchronous loading each abort makes lookups slower: the client leaks the id of every aborted request.

Symptom: With `enable_async_loading`, `aborted_lookups` grows by one id per abort, and each lookup checks all ids.

Cause: `request_finished` also cancels lookups that LMCache's client no longer has (0.5.6 vllm_v1_adapter.py:1913).
`cancel_lookup` then keeps the ids of these lookups for ever (lmcache_async_lookup_client.py 0.5.6:256-275).

Fix: The fix skips `cancel_lookup` if the client does not have the lookup.
- Remove when: `cancel_lookup` checks whether the lookup exists.
"""

from kvfix.fixes.api import ASYNC_LOOKUP_CLIENT, Any, Fix, fix_around, instead, stubs


@fix_around()
def fix(client: Any, lookup_id: str) -> Any:
    return None if lookup_id in client.reqs_status else instead(None)


def shows_bug(hook: Any, client: Any) -> bool:
    """Cancel a lookup that the client does not have. With the bug, the client keeps the id of the lookup."""
    stub = stubs.async_lookup_client(reqs_status={})
    hook(stub, stubs.NAME)
    return stubs.NAME in stub.aborted_lookups


FIX = Fix(
    ASYNC_LOOKUP_CLIENT.cancel_lookup(broken=">=0.3.10", probe=shows_bug, fix=fix),
    effect="leak",
    evidence={"KVR009": r"^lookup_client\.(aborted_lookups|reqs_status) "},
    scenarios=("async-abort-keeps-lookup",),
)
