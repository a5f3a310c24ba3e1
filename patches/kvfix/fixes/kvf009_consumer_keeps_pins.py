"""A decode instance (kv_consumer) never takes back the pins of its lookups.

## Symptom
On a consumer, `Pin timeout detected for MemoryObj ...` and `Force unpinned ... timeout objects`; before that the cache
cannot evict what it no longer needs.

## Cause
`wait_for_save` unpins the requests of the step and saves them. A consumer saves nothing, and the hook returns before
both.

## Fix
On a consumer the requests of the step are unpinned after the hook.

## Releases
LMCache 0.3.9 to 0.4.2.

## Upstream
https://github.com/LMCache/LMCache/pull/2786; fixed in 0.4.3.

## Remove when
LMCache 0.4.2 is no longer in use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    def wait_for_save(impl: Any, answer: None) -> None:
        if impl.kv_role == "kv_consumer":
            for request in impl._parent._get_connector_metadata().requests:
                impl.lmcache_engine.lookup_unpin(request.req_id)

    return after(wait_for_save)


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A step with one request on a consumer. Wrong is not to unpin it."""
    unpinned: list[Any] = []
    metadata = adapter.LMCacheConnectorMetadata()
    metadata.requests = [SimpleNamespace(req_id="kvfix-probe", save_spec=None)]
    engine = SimpleNamespace(lookup_unpin=unpinned.append)
    parent = SimpleNamespace(_get_connector_metadata=lambda: metadata)
    hook(SimpleNamespace(kv_role="kv_consumer", lmcache_engine=engine, _parent=parent))
    return not unpinned


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.wait_for_save",
            broken=">=0.3.9,<0.4.3",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
