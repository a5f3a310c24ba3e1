"""A chunk that was loaded asynchronously is released twice: it is freed, and the cache still lists it.

## Symptom
The next request that hits the chunk finds a memory object without a tensor: `assert memory_obj.tensor is not None`, and
the worker dies; or other KV in its place. Before that, perhaps, `Double unpin occurred somewhere.`

## Cause
`retrieve` releases the chunks that it has loaded (0.5.6 cache_engine.py:962-964) and those that it did not need
(:1733); then `lookup_unpin` cleans up the lookup, which releases all of them once more (:1409-1441).

## Fix
While `retrieve` runs, each fetched chunk has one reference more; the one that `retrieve` did not take is given back
after it. The clean-up is then the only release.

## Releases
LMCache 0.4.1 to 0.5.6, with `enable_async_loading`: to 0.5.1 only chunks that vLLM has already.

## Upstream
https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/pull/5120 are open.

## Remove when
One of `retrieve` and `cleanup_memory_objs` leaves what the other releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(engine: ModuleType) -> Callable[..., Any]:
    @around
    def retrieve(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Generator[None, Any, Any] | None:
        held = []
        if engine.async_loading and not engine.remove_after_retrieve:
            for chunk in _engine.fetched(engine, more.get("req_id")):
                chunk.ref_count_up()
                held.append((chunk, chunk.get_ref_count()))
        return _given_back(held) if held else None

    return retrieve


def _given_back(held: list[tuple[Any, int]]) -> Generator[None, Any, Any]:
    answer = yield
    for chunk, references in held:
        if chunk.get_ref_count() == references:
            chunk.ref_count_down()
    return answer


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
