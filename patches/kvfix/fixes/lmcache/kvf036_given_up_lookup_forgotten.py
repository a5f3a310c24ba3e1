"""A worker dies or chunks leak: LMCache takes the late answer of a lookup that timed out for that of the next lookup.

## Symptom
After `Request ... is still waiting for async lookup after 3 seconds, returning 0 lmcache cached tokens so vllm can
recompute`, for a request that is preempted: `AssertionError: Event ... of type EventType.LOADING is not done or not
found.` in a worker, which dies (several workers). Or nothing is logged, and fetched chunks are never released.

## Cause
A request whose lookup was given up is computed. When it gets its blocks, `update_state_after_alloc` has the client
forget the lookup (lmcache_async_lookup_client.py 0.5.6:251), which is still in flight. If the request is preempted, it
is looked up again under the same id, and nothing tells the answers apart. With several workers the answers of one
worker to both lookups count as one of each, so the load begins before the others have fetched. Then the answer of the
given-up lookup is cleaned up, a third lookup is sent, and what that one fetches is never released.

## Fix
The client keeps a cancelled lookup until its answer has come and was cleaned up. Until then the request is not looked
up again (KVF011).

## Releases
LMCache 0.3.10 to 0.5.6, with `enable_async_loading`.

## Upstream
None known.

## Remove when
`clear_lookup_status` leaves a lookup in `aborted_lookups` as it is, or each lookup has an id of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import ASYNC_LOOKUP_CLIENT
from kvfix.wrapping import around, instead


def fix(client: ModuleType) -> Callable[..., Any]:
    def clear_lookup_status(client: Any, lookup_id: str) -> Any:
        return instead(None)

    # The clean-up takes the lookup out of `aborted_lookups` before it clears it.
    return around(clear_lookup_status, when=lambda client, lookup_id: lookup_id in client.aborted_lookups)


def shows_bug(hook: Callable[..., Any], client: ModuleType) -> bool:
    """A cancelled lookup in flight is cleared. Wrong is to forget it."""
    stub = SimpleNamespace(
        lock=threading.Lock(), reqs_status={stubs.NAME: None}, first_lookup_time={}, aborted_lookups={stubs.NAME}
    )
    hook(stub, stubs.NAME)
    return stubs.NAME not in stub.reqs_status


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(ASYNC_LOOKUP_CLIENT.clear_lookup_status(broken=">=0.3.10", probe=shows_bug, fix=fix),),
    evidence={
        "KVR009": r"^(lookup_client\.(aborted_lookups|reqs_status)|fetched chunks of the worker) ",
        "KVR011": "EventType.LOADING is not done or not found",
    },
    scenarios=("async-given-up-asked-again", "async-given-up-of-one-rank"),
)
