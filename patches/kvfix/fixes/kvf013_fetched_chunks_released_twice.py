"""A chunk that was loaded asynchronously is released twice: it is freed, and the cache still lists it.

## Symptom
The next request that hits the chunk finds a memory object without a tensor: `assert memory_obj.tensor is not None`, and
the worker dies; or other KV in its place. Before that, perhaps, `Double unpin occurred somewhere.`

## Cause
`retrieve` releases the chunks that it has loaded (0.5.6 cache_engine.py:962-964) and those that it did not need
(:1733); then `lookup_unpin` cleans up the lookup, which releases all of them once more (:1409-1441).

## Fix
What `retrieve` has released is taken out of what the lookup has fetched: the clean-up releases the rest. A chunk that
`retrieve` did not need loses its pin with its reference, which the clean-up would have released.

## Releases
LMCache 0.4.1 to 0.5.6, with `enable_async_loading`: to 0.5.1 only chunks that vLLM has already.

## Upstream
https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/pull/5120 are open.

## Remove when
One of `retrieve` and `cleanup_memory_objs` leaves what the other releases.
"""

from __future__ import annotations

from _thread import get_ident
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around, replaced
from kvfix.fix import Fix, Patch
from kvfix.fixes import _engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(engine: ModuleType) -> Callable[..., Any]:
    @around
    def retrieve(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Generator[None, Any, Any] | None:
        lookup_id = more.get("req_id")
        if not engine.async_loading or engine.remove_after_retrieve or not _engine.fetched(engine, lookup_id):
            return None
        return _consumed(engine, lookup_id)

    return retrieve


class Calls:
    """What this thread takes of a chunk while it loads it; others may have references to the same chunk meanwhile."""

    def __init__(self, chunk: Any) -> None:
        self.references = self.pins = 0
        thread = get_ident()
        down, unpin = chunk.ref_count_down, chunk.unpin

        def ref_count_down() -> Any:
            self.references += get_ident() == thread
            return down()

        def take_pin() -> Any:
            self.pins += get_ident() == thread
            return unpin()

        self.counted = {"ref_count_down": ref_count_down, "unpin": take_pin}


def _consumed(engine: Any, lookup_id: Any) -> Generator[None, Any, Any]:
    chunks = {id(chunk): (chunk, Calls(chunk)) for chunk in _engine.fetched(engine, lookup_id)}
    try:
        with ExitStack() as stack:
            for chunk, calls in chunks.values():
                stack.enter_context(replaced(chunk, **calls.counted))
            return (yield)
    finally:
        gone = {name for name, (_, calls) in chunks.items() if calls.references}
        for name in gone:
            chunk, calls = chunks[name]
            if not calls.pins:
                _engine.unpin(chunk)
        _engine.keep_fetched(engine, lookup_id, lambda chunk: id(chunk) not in gone)


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=_engine.MODULE,
            function="LMCacheEngine.retrieve",
            broken=">=0.4.1",
            shows_bug=probe.cannot_tell,
            correct=correct,
        ),
    ),
)
