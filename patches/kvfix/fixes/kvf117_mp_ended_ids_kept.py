"""The worker remembers the id of every request that has ended, for ever; one that comes again is never freed.

## Symptom
None at first: the workers' memory grows with every request, by 100 to 150 bytes. Where an id comes again (a vLLM that
takes them as clients give them), that request's blocks are never freed: the KV cache fills up.

## Cause
The adapter keeps the ids that it has reported as done, since with asynchronous scheduling one may be asked about twice
in steps that follow each other. Nothing takes them out (`_returned_finished`, vllm_multi_process_adapter.py
0.5.6:2034), and it reports none twice.

## Fix
It keeps the last 32 of them, at most twice as many, and those of the last step in which requests ended, however many.

## Releases
LMCache 0.4.3 to 0.5.6, with its own connector and with vLLM's copy.

## Upstream
https://github.com/LMCache/LMCache/issues/5339 (open); https://github.com/LMCache/LMCache/pull/5363 (open) bounds their
number. Seen before that in the review of a fork, https://github.com/local-inference-lab/vllm/pull/525.

## Remove when
`_returned_finished` is emptied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSet
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

KEPT = 32


class Recent(MutableSet[str]):
    """A set of ids that forgets: when more than KEPT are new, those become the old ones, and what was old goes.

    `update` is called in every step, and costs what it costs a set. Whether one is in it is asked of each request that
    ends, so there it forgets: between two updates once at most, and the last one's ids are kept.
    """

    def __init__(self) -> None:
        self._old: set[str] = set()
        self._new: set[str] = set()
        self.update = self._new.update

    @classmethod
    def _from_iterable(cls, ids: Iterable[str]) -> set[str]:  # type: ignore[override]
        return set(ids)

    def __contains__(self, request_id: object) -> bool:
        if len(self._new) > KEPT:
            self._old = set(self._new)
            self._new.clear()
        return request_id in self._new or request_id in self._old

    def __iter__(self) -> Iterator[str]:
        return iter(self._new | self._old)

    def __len__(self) -> int:
        return len(self._new | self._old)

    def add(self, value: str) -> None:
        self._new.add(value)

    def discard(self, value: str) -> None:
        self._new.discard(value)
        self._old.discard(value)


def correct(module: ModuleType) -> Callable[..., Any]:
    def __init__(adapter: Any, answer: None, *_: Any, **__: Any) -> None:
        adapter._returned_finished = Recent()
        return answer

    return after(__init__)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A request has ended in each of 128 steps. What is asked is the function that `__init__` makes the set for."""
    adapter = SimpleNamespace(
        finished_stores=set(),
        store_futures={},
        previously_finished=set(),
        _returned_finished=set(),
        _returned_finished_steps=deque(),  # of patches/upstream/mp-ended-ids-kept
        _update_and_get_finished_store=set,
    )
    for number in range(4 * KEPT):
        module.LMCacheMPWorkerAdapter._process_finished_stores(adapter, set(), {str(number)})
    return len(set(adapter._returned_finished)) == 4 * KEPT


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPWorkerAdapter.__init__",
            broken=">=0.4.3",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
