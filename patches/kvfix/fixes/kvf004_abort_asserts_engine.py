"""The first client that goes away kills EngineCore: the scheduler's side is asserted to have a cache engine.

## Symptom
A bare `AssertionError` at `assert self.lmcache_engine is not None` in `request_finished`
(vllm_v1_adapter.py:1779 in 0.4.5), and EngineCore dies, when a request is aborted.

## Cause
To tell the storage of an abort, the hook asks for the cache engine. Only the workers have one; the scheduler's side has
none, unless `enable_scheduler_bypass_lookup` is set.

## Fix
An abort without a cache engine goes through the hook as any other end of a request; a lookup that is under way is
cancelled as before.

## Releases
LMCache 0.4.5 to 0.5.0.

## Upstream
https://github.com/LMCache/LMCache/issues/3337, https://github.com/LMCache/LMCache/pull/3340; fixed in 0.5.1.

## Remove when
LMCache 0.4.5 to 0.5.0 are no longer in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import View, around
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    aborted = adapter.RequestStatus.FINISHED_ABORTED

    @around
    def request_finished(impl: Any, request: Any, block_ids: Any) -> Generator[Any, Any, Any] | None:
        if impl.lmcache_engine is not None or request.status != aborted:
            return None
        return _without_engine(impl, request, block_ids)

    return request_finished


def _without_engine(impl: Any, request: Any, block_ids: Any) -> Generator[Any, Any, Any]:
    answer = yield View(request, status=None), block_ids
    if impl.async_loading and impl.lookup_client is not None:
        impl.lookup_client.cancel_lookup(request.request_id)
    return answer


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """An abort on the scheduler's side. Wrong is an AssertionError."""
    try:
        hook(probe.scheduler_side(), probe.request(16, status=adapter.RequestStatus.FINISHED_ABORTED), [])
    except AssertionError:
        return True
    return False


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.request_finished",
            broken=">=0.4.5,<0.5.1",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
