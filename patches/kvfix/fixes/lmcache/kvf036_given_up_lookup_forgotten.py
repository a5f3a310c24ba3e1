"""A worker dies or chunks leak: LMCache uses the late answer of a timed-out lookup for the next lookup.

Symptom: The scheduler logs `Request ... is still waiting for async lookup after 3 seconds, returning 0 lmcache cached
tokens so vllm can recompute`, and the request is preempted later. With several workers, a worker then dies with
`AssertionError: Event ... of type EventType.LOADING is not done or not found.` Or fetched chunks leak silently.

Cause: vLLM computes a request whose lookup timed out. When the request gets its blocks, `update_state_after_alloc`
deletes the lookup from the client (lmcache_async_lookup_client.py 0.5.6:251), although the lookup is still in flight.
If vLLM preempts the request, LMCache starts a second lookup with the same id.

The client counts replies by id only. Replies to both lookups complete the count too early, and the client sends a third
lookup. The client may then count late replies to the second lookup as replies to the third, and the load begins early.
A worker that has not fetched its chunks dies. If no worker dies, the chunks of the third lookup leak.

Fix: The client keeps a timed-out lookup until LMCache cleans up the lookup. Another fix, KVF011, returns 0 tokens for
this lookup, and the client sends no second lookup.
- Releases: LMCache 0.3.10 to 0.5.6, with `enable_async_loading`.
- Remove when: `clear_lookup_status` does not delete a lookup in `aborted_lookups`, or each lookup has an id of its own.
"""

from kvfix.fixes.api import ASYNC_LOOKUP_CLIENT, Any, Fix, fix_around, instead, stubs


# LMCache's clean-up can still clear a lookup, because the clean-up first removes the lookup from `aborted_lookups`.
@fix_around(when=lambda client, lookup_id: lookup_id in client.aborted_lookups)
def fix(client: Any, lookup_id: str) -> Any:
    return instead(None)


def shows_bug(hook: Any, client: Any) -> bool:
    """Clear a timed-out lookup that is in flight. With the bug, the client forgets the lookup."""
    stub = stubs.async_lookup_client(aborted_lookups={stubs.NAME})
    hook(stub, stubs.NAME)
    return stubs.NAME not in stub.reqs_status


FIX = Fix(
    ASYNC_LOOKUP_CLIENT.clear_lookup_status(broken=">=0.3.10", probe=shows_bug, fix=fix),
    effect="crash",
    evidence={
        "KVR009": r"^(lookup_client\.(aborted_lookups|reqs_status)|fetched chunks of the worker) ",
        "KVR011": "EventType.LOADING is not done or not found",
    },
    scenarios=("async-given-up-asked-again", "async-given-up-of-one-rank"),
)
