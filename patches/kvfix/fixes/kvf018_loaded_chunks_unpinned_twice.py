"""A chunk that was loaded is unpinned twice: by the load, and at the end of the step; the second pin was another's.

## Symptom
At every hit, once for each chunk: `Pin count of MemoryObj ... is negative: -1.Double unpin occurred somewhere.Setting
pin count back to 0 as a hack but please find the bug.` Under pressure, requests whose hit is evicted before they load
it: `Num retrieved tokens: 0, num expected tokens: ...`.

## Cause
A lookup pins the chunks that it finds in the CPU cache until `lookup_unpin`. `retrieve` (0.5.2 to 0.5.5
cache_engine.py:935) and, with `use_layerwise`, `retrieve_layer` (0.4.3 to 0.5.6, 0.5.6:1139) unpin what they have
loaded, for chunks read from disk; but those of the CPU cache are the very objects that were pinned. Where another
request waits with a pin on the same chunk, it is that pin that goes.

## Fix
While a load runs, each chunk of the CPU cache that its lookup has pinned has one pin more; where the load did not take
it, it is taken back. The pins of the lookup are then taken back once, by `lookup_unpin`. The adapter does not say whose
chunks it loads by layers (0.5.6 vllm_v1_adapter.py:842): the cache engine is told.

## Releases
LMCache 0.5.2 to 0.5.5; with `use_layerwise` 0.4.3 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/issues/2954,
https://github.com/LMCache/LMCache/pull/5095 are open; `retrieve` is right in 0.5.6.

## Remove when
`retrieve_layer` leaves the pins of a lookup to `lookup_unpin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import notice, probe
from kvfix.correction import after, around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _engine, _layerwise

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import ModuleType


def _pinned(engine: Any, lookup_id: Any) -> list[tuple[Any, int]]:
    """Chunks of the CPU cache that this lookup has pinned, each with a pin more, and how many it has then."""
    if engine.async_loading or engine.remove_after_retrieve or lookup_id not in engine.lookup_pins:
        return []
    cached = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
    held = []
    for key in engine.lookup_pins[lookup_id].get("LocalCPUBackend", ()):
        chunk = cached.get(key)
        if chunk is not None:
            chunk.pin()
            held.append((chunk, chunk.meta.pin_count))
    return held


def _take_back(held: list[tuple[Any, int]]) -> None:
    for chunk, pins in held:
        if chunk.meta.pin_count == pins:
            chunk.unpin()


def correct(engine: ModuleType) -> Callable[..., Any]:
    @around
    def retrieve(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Generator[None, Any, Any] | None:
        held = _pinned(engine, more.get("req_id"))
        return _loading(held) if held else None

    return retrieve


def _loading(held: list[tuple[Any, int]]) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        _take_back(held)


def correct_layers(engine: ModuleType) -> Callable[..., Any]:
    """The hook is a generator: it loads while it is iterated, a layer at a time."""

    def retrieve_layer(engine: Any, layers: Any, tokens: Any, mask: Any = None, **more: Any) -> Any:
        held = _pinned(engine, more.get("req_id"))
        return _layers(layers, held) if held else layers

    return after(retrieve_layer)


def _layers(layers: Any, held: list[tuple[Any, int]]) -> Iterator[Any]:
    try:
        yield from layers
    finally:
        notice.guarded(f"{__name__}.retrieve_layer", _take_back, held)


def name_request(adapter: ModuleType) -> Callable[..., Any]:
    return _layerwise.loads(lambda call, request: call.setdefault("req_id", request.req_id))


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        *(
            Patch("lmcache", _engine.MODULE, f"LMCacheEngine.{function}", broken, probe.cannot_tell, correction)
            for function, broken, correction in (
                ("retrieve", ">=0.5.2,<0.5.6", correct),
                ("retrieve_layer", ">=0.4.3", correct_layers),
            )
        ),
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.start_load_kv",
            broken=">=0.4.3",
            shows_bug=probe.cannot_tell,
            correct=name_request,
            helper=True,
        ),
    ),
)
