"""A request that ends before it is admitted leaves its LoadSpec, hit, priority and pins behind.

## Symptom
Nothing is logged at first. `load_specs` and `_requests_priority` grow; 300 seconds later, for chunks that could not be
evicted so long, `Pin timeout detected for MemoryObj ...`. A request id that is used again gets the hit of the dead
request: `Num retrieved tokens: 0, num expected tokens: ...`.

## Cause
A lookup pins what it finds and keeps the hit until the request is admitted. A client that goes away before that leaves
both: `request_finished` cleans up neither, and the workers unpin only requests that are in a step's metadata. The
priority of a resumed request is kept even when all goes well: only new requests take theirs out.

## Fix
When a request has ended, LoadSpec, priority and hit go with it on the scheduler's side; the workers, who are told of
every ended request, take back its pins.

## Releases
LMCache 0.3.9 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/pull/4512 is open (the pins only).

## Remove when
`request_finished` takes the request out of `load_specs`, `_requests_priority` and the lookup client, and `get_finished`
unpins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct_scheduler(adapter: ModuleType) -> Callable[..., Any]:
    def request_finished(impl: Any, answer: Any, request: Any, block_ids: Any) -> Any:
        name = request.request_id
        impl.load_specs.pop(name, None)
        impl._requests_priority.pop(name, None)
        # With asynchronous loading the hook itself cancels the lookup, which is cleaned up once it is answered.
        if impl.lookup_client is not None and not getattr(impl, "async_loading", False):
            impl.lookup_client.clear_lookup_status(name)
        return answer

    # One that is admitted has neither, but for the priority of a resumed one. Every lookup leaves one of the two.
    return after(
        request_finished, when="request.request_id in impl._requests_priority or request.request_id in impl.load_specs"
    )


def correct_worker(adapter: ModuleType) -> Callable[..., Any]:
    def get_finished(impl: Any, answer: Any, finished_req_ids: Any) -> Any:
        # With asynchronous loading a lookup pins nothing: what it fetched is let go by the clean-up of the lookup.
        engine = impl.lmcache_engine
        if engine is not None and not getattr(impl, "async_loading", False):
            for name in finished_req_ids:
                engine.lookup_unpin(name)
        return answer

    return after(get_finished, when="finished_req_ids")


def scheduler_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request ends while its LoadSpec is there. Wrong is a LoadSpec that stays."""
    client = SimpleNamespace(clear_lookup_status=lambda lookup_id: None)
    impl = probe.scheduler_side(lookup_client=client, load_specs={probe.NAME: object()})
    hook(impl, probe.request(16), [])
    return probe.NAME in impl.load_specs


def worker_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """The worker is told that a request has ended. Wrong is not to unpin it."""
    unpinned: list[Any] = []
    engine = SimpleNamespace(lookup_unpin=unpinned.append)
    hook(SimpleNamespace(lmcache_engine=engine, async_loading=False), {probe.NAME})
    return not unpinned


ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.request_finished",
            broken=">=0.3.9",
            shows_bug=scheduler_shows_bug,
            correct=correct_scheduler,
        ),
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.get_finished",
            broken=">=0.3.9",
            shows_bug=worker_shows_bug,
            correct=correct_worker,
        ),
    ),
)
