"""A loaded chunk is unpinned twice, by the load and at the end of the step: the second time another request's pin.

## Symptom
At every hit, once for each chunk: `Pin count of MemoryObj ... is negative: -1.Double unpin occurred somewhere.Setting
pin count back to 0 as a hack but please find the bug.` Under pressure, requests whose hit is evicted before they load
it: `Num retrieved tokens: 0, num expected tokens: ...`.

## Cause
A lookup pins the chunks that it finds in the CPU cache until `lookup_unpin`. `retrieve` (0.5.2 to 0.5.5
cache_engine.py:935) and, with `use_layerwise`, `retrieve_layer` (0.4.3 to 0.5.6, 0.5.6:1139) unpin what they have
loaded. That is right for chunks read from disk, but chunks of the CPU cache are the same objects that the lookup
pinned. If another request waits with a pin on the same chunk, it loses its pin.

## Fix
While a load runs, each chunk of the CPU cache that its lookup has pinned gets one more pin. If the load did not release
it, the fix does. Then `lookup_unpin` releases the pins of the lookup once. The adapter does not pass the request id
when it loads by layers (0.5.6 vllm_v1_adapter.py:842); the fix adds it to the call.

## Releases
LMCache 0.5.2 to 0.5.5; with `use_layerwise` 0.4.3 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/issues/2954,
https://github.com/LMCache/LMCache/pull/5095 are open; `retrieve` is right in 0.5.6.

## Remove when
`retrieve_layer` does not release the pins of a lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any

from kvfix import engine_log
from kvfix.fixes import _layerwise, stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import CACHE_ENGINE, LMCACHE_V1
from kvfix.wrapping import after, around


def _pinned(engine: Any, lookup_id: Any) -> list[tuple[Any, int]]:
    """Add a pin to each chunk of the CPU cache that this lookup has pinned; the chunks with their pin counts."""
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


def _release_added_pins(held: list[tuple[Any, int]]) -> None:
    for chunk, pins in held:
        if chunk.meta.pin_count == pins:
            chunk.unpin()


def fix(engine: ModuleType) -> Callable[..., Any]:
    @around
    def retrieve(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Generator[None, Any, Any] | None:
        held = _pinned(engine, more.get("req_id"))
        return _loading(held) if held else None

    return retrieve


def _loading(held: list[tuple[Any, int]]) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        _release_added_pins(held)


def fix_layers(engine: ModuleType) -> Callable[..., Any]:
    """The hook is a generator: it loads while it is iterated, a layer at a time."""

    def retrieve_layer(engine: Any, layers: Any, tokens: Any, mask: Any = None, **more: Any) -> Any:
        held = _pinned(engine, more.get("req_id"))
        return _layers(layers, held) if held else layers

    return after(retrieve_layer)


def _layers(layers: Any, held: list[tuple[Any, int]]) -> Iterator[Any]:
    try:
        yield from layers
    finally:
        engine_log.guarded(f"{__name__}.retrieve_layer", _release_added_pins, held)


def name_request(adapter: ModuleType) -> Callable[..., Any]:
    return _layerwise.loads(lambda call, request: call.setdefault("req_id", request.req_id))


FIX = Fix(
    __name__,
    __doc__,
    effect="leak",
    targets=(
        CACHE_ENGINE.retrieve(broken=">=0.5.2,<0.5.6", probe=stubs.cannot_tell, fix=fix, place=3),
        CACHE_ENGINE.retrieve_layer(broken=">=0.4.3", probe=stubs.cannot_tell, fix=fix_layers),
        LMCACHE_V1.start_load_kv(broken=">=0.4.3", probe=stubs.cannot_tell, fix=name_request, place=2, helper=True),
    ),
    evidence={"KVD403": ""},
    proof="tests/lab/test_async_release.py, on LMCache's own functions: the lab has no pins by chunk",
)
