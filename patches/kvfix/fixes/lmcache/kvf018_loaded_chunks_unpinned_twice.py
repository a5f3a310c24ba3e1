"""Requests lose their hits: LMCache unpins a loaded chunk twice, and the second unpin removes another request's pin.

Symptom: For each chunk of each hit, LMCache logs `Pin count of MemoryObj ... is negative: -1.Double unpin occurred
somewhere.Setting pin count back to 0 as a hack but please find the bug.` If the CPU cache is full, LMCache evicts
chunks of a hit before the request loads them, and logs `Num retrieved tokens: 0, num expected tokens: ...`.

Cause: A lookup pins the chunks that it finds in the CPU cache. `lookup_unpin` unpins these chunks. In LMCache 0.5.2 to
0.5.5, `retrieve` unpins the loaded chunks (cache_engine.py:935). In 0.4.3 to 0.5.6, `retrieve_layer` also unpins them
(0.5.6:1139). This unpin is right for chunks read from disk. But a chunk of the CPU cache is the object that the
lookup has pinned, so `lookup_unpin` unpins the chunk again. If a second request has pinned the chunk, that pin is lost.

Fix: When a load begins, the fix adds one pin to each chunk of the CPU cache that the request's lookup has pinned. If
the load does not release an added pin, the fix releases it. The fix also passes the request id to `retrieve_layer`.
- Releases: LMCache 0.5.2 to 0.5.5; with `use_layerwise` 0.4.3 to 0.5.6.
- Upstream: https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/issues/2954,
  https://github.com/LMCache/LMCache/pull/5095 are open; `retrieve` is fixed in 0.5.6.
- Remove when: `retrieve_layer` does not release the pins of a lookup.
"""

from _thread import get_ident
from collections import Counter
from collections.abc import Iterator

from kvfix.fixes import _lmcache
from kvfix.fixes.api import CACHE_ENGINE, LMCACHE_V1, Any, Fix, Steps, engine_log, fix_after, fix_around

#: Attribute of a chunk. The attribute lists the loads for which the fix has added a pin to the chunk.
_LOADS = "_kvfix_loads"


class _Load:
    """The pins that the fix adds for one load, and the pins that the load itself releases.

    `with load:` surrounds LMCache's code for this load. Layerwise loads take turns in a thread, and other threads can
    release pins at any time. So a load counts only the releases that its own thread makes inside `with load:`.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self._chunks = chunks
        self._released: Counter[int] = Counter()
        self._thread = 0
        for chunk in chunks:
            _loads_of(chunk).append(self)
        for chunk in chunks:
            chunk.pin()

    def __enter__(self) -> None:
        self._thread = get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = 0

    def note_release(self, chunk: Any) -> None:
        self._released[id(chunk)] += self._thread == get_ident()

    def end(self) -> None:
        """Release each added pin that the load did not release."""
        for chunk in self._chunks:
            loads = vars(chunk)[_LOADS]
            loads.remove(self)
            if not loads:
                del vars(chunk)[_LOADS], vars(chunk)["unpin"]
            if self._released[id(chunk)]:
                self._released[id(chunk)] -= 1
            else:
                chunk.unpin()


def _loads_of(chunk: Any) -> list[_Load]:
    """Return the list of loads that `chunk.unpin` notifies. The first call wraps `chunk.unpin`."""
    if _LOADS not in vars(chunk):
        loads: list[_Load] = []
        own = chunk.unpin

        def unpin() -> Any:
            for load in loads:
                load.note_release(chunk)
            return own()

        vars(chunk).update({_LOADS: loads, "unpin": unpin})
    found: list[_Load] = vars(chunk)[_LOADS]
    return found


def _pinned(engine: Any, lookup_id: Any) -> _Load | None:
    """Add a pin to each chunk of the CPU cache that this lookup has pinned. Return None if no pin is added."""
    if engine.async_loading or engine.remove_after_retrieve or lookup_id not in engine.lookup_pins:
        return None
    cached = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
    found = map(cached.get, engine.lookup_pins[lookup_id].get("LocalCPUBackend", ()))
    chunks = [chunk for chunk in found if chunk is not None]
    return _Load(chunks) if chunks else None


@fix_around()
def fix(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Steps:
    load = _pinned(engine, more.get("req_id"))
    if load is None:
        return (yield)
    try:
        with load:
            return (yield)
    finally:
        load.end()


@fix_after()
def fix_layers(engine: Any, layers: Any, tokens: Any, mask: Any = None, **more: Any) -> Any:
    """Add the pins for a layerwise load. layers: a generator that loads one layer in each iteration."""
    load = _pinned(engine, more.get("req_id"))
    return _layers(layers, load) if load else layers


def _layers(layers: Any, load: _Load) -> Iterator[Any]:
    try:
        while True:
            with load:
                try:
                    layer = next(layers)
                except StopIteration:
                    return
            yield layer
    finally:
        engine_log.guarded(f"{__name__}.retrieve_layer", load.end)


name_request = _lmcache.layer_loads(lambda call, request: call.setdefault("req_id", request.req_id))

FIX = Fix(
    CACHE_ENGINE.retrieve(broken=">=0.5.2,<0.5.6", fix=fix, order=3),
    CACHE_ENGINE.retrieve_layer(broken=">=0.4.3", fix=fix_layers),
    LMCACHE_V1.start_load_kv(broken=">=0.4.3", fix=name_request, order=2, helper=True),
    effect="leak",
    evidence={"KVD403": ""},
    proof="tests/lab/test_async_release.py, on LMCache's own functions: the lab keeps pins per lookup, not per chunk",
)
