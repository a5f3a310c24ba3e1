"""With asynchronous loading every client that goes away leaves its request's id in the lookup client, for ever.

## Symptom
Nothing is logged. `aborted_lookups` grows by one id per aborted request, and each lookup walks through all of them.

## Cause
`request_finished` cancels the lookup of every aborted request, also of one whose lookup was answered and used long ago
(0.5.6 vllm_v1_adapter.py:1903). `cancel_lookup` keeps the id until an answer comes, and none will
(lmcache_async_lookup_client.py 0.5.6:264-280).

## Fix
A lookup that the client does not know is not cancelled.

## Releases
LMCache 0.3.10 to 0.5.6, with `enable_async_loading`.

## Upstream
None known.

## Remove when
`cancel_lookup` looks whether there is a lookup.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(client: ModuleType) -> Callable[..., Any]:
    @around
    def cancel_lookup(client: Any, lookup_id: str) -> Any:
        return None if lookup_id in client.reqs_status else instead(None)

    return cancel_lookup


def shows_bug(hook: Callable[..., Any], client: ModuleType) -> bool:
    """A lookup that the client does not know is cancelled. Wrong is to remember that."""
    stub = SimpleNamespace(aborted_lookups=set(), reqs_status={})
    hook(stub, probe.NAME)
    return probe.NAME in stub.aborted_lookups


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.v1.lookup_client.lmcache_async_lookup_client",
            function="LMCacheAsyncLookupClient.cancel_lookup",
            broken=">=0.3.10",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
