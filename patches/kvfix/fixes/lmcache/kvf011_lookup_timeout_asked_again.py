"""EngineCore dies after a lookup timeout: the next `get_num_new_matched_tokens` of the request raises KeyError.

Symptom: LMCache logs `Request ... is still waiting for async lookup after 3 seconds, returning 0 lmcache cached tokens
so vllm can recompute`. Then the asynchronous lookup client raises `KeyError: '<request id>'`, and EngineCore dies.

Cause: With `enable_async_loading` a lookup times out after `lookup_timeout_ms`. The client then returns 0 and deletes
the lookup's start time, but the lookup stays in flight. If no block is free, vLLM asks for the hit again in the
next step, and the client reads the deleted start time (lmcache_async_lookup_client.py 0.5.6:175, :187). Up to 0.3.15
the client also does not cancel the lookup. If the request ends before the late result, the result and the chunks leak.

Fix: After a timeout, the fix returns 0 for the request until the late result has arrived and LMCache has cleaned up the
lookup. When the lookup times out, the fix also cancels the lookup. LMCache 0.4.1 and later cancel the lookup too. The
second cancellation changes nothing.
- Upstream: https://github.com/LMCache/LMCache/issues/3685, https://github.com/LMCache/LMCache/pull/3766 is open.
- Remove when: `lookup_cache` no longer raises for a lookup that has timed out.
"""

from kvfix.fixes.api import ASYNC_LOOKUP_CLIENT, Any, Fix, Steps, fix_around, stubs


def given_up(client: Any, lookup_id: str) -> bool:
    """Return True if the lookup has timed out: the lookup is in flight, but LMCache has deleted its start time."""
    return client.reqs_status.get(lookup_id, "unknown") is None and lookup_id not in client.first_lookup_time


def _answered(client: Any, lookup_id: str) -> Steps:
    if given_up(client, lookup_id):
        return 0
    yield
    if given_up(client, lookup_id):  # the lookup has just timed out, so cancel it as 0.4.1 does
        client.cancel_lookup(lookup_id)


fix = fix_around()(_answered)


@fix_around()
def fix_0_3_10(client: Any, tokens: Any, lookup_id: str, request_configs: Any = None) -> Steps:
    """Do the same as `fix` for LMCache 0.3.10, where `lookup` itself keeps the state of the lookups."""
    return _answered(client, lookup_id)


def shows_bug(hook: Any, module: Any, *tokens: Any) -> bool:
    """Ask for the hit of a lookup that is in flight, but lacks a start time. The bug raises KeyError."""
    return stubs.raises(KeyError, hook, stubs.async_lookup_client(), *tokens, stubs.NAME)


FIX = Fix(
    ASYNC_LOOKUP_CLIENT.lookup_cache(broken=">=0.3.10.post1", probe=shows_bug, fix=fix),
    ASYNC_LOOKUP_CLIENT.lookup(broken="==0.3.10", probe=lambda *probed: shows_bug(*probed, []), fix=fix_0_3_10),
    effect="crash",
    evidence={"KVD114": "", "KVD211": "", "KVR011": "KeyError"},
    scenarios=("async-late-answer-left", "async-lookup-timeout"),
)
