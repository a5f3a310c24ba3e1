"""Objects that a fix puts in the place of an engine's object: they differ in one attribute, and cannot raise."""

from types import SimpleNamespace
from typing import Any

from kvfix.fixes.lmcache import kvf018_loaded_chunks_unpinned_twice as kvf018
from kvfix.fixes.lmcache_mp import kvf103_mp_retrieve_false as kvf103
from kvfix.fixes.lmcache_mp import kvf109_mp_freed_while_stored as kvf109


class Future:
    """Like LMCache's future, with one more function that a later release may have."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def query(self) -> Any:
        return self.answer

    def wait(self, timeout: float | None = None) -> Any:
        return self.answer

    def result(self, timeout: float | None = None, *, strict: bool = False) -> Any:
        return self.answer

    def cancel(self) -> str:
        return "cancelled"


def test_a_failed_load_answers_even_if_it_cannot_be_recorded(faults: dict[str, int]) -> None:
    """A worker without the list of failed blocks."""
    load = kvf103.load(SimpleNamespace(), Future(False), [3])
    assert load.result(timeout=1, strict=True) is False
    assert load.cancel() == "cancelled"
    assert list(faults) == [
        "a fault of kvfix itself in kvfix.fixes.lmcache_mp.kvf103_mp_retrieve_false.load: AttributeError"
    ]


def test_thousands_of_stores_as_one() -> None:
    """A long prompt in small steps. `query` of one future within another ended in a RecursionError."""
    stores = [Future(False) for _ in range(5000)]
    both: Any = stores[0]
    for store in stores[1:]:
        both = kvf109.both(both, store)
    assert both.query() is False
    for store in stores[:-1]:
        store.answer = True
    assert both.query() is False
    assert (both.wait(1), both.result(strict=True), both.cancel()) == (False, False, "cancelled")
    stores[-1].answer = True
    assert both.query() is True


def test_a_layerwise_load_ends_even_if_a_pin_cannot_be_released(faults: dict[str, int]) -> None:
    chunk = SimpleNamespace(pin=list, unpin=None)
    assert list(kvf018._layers(iter([1, 2]), kvf018._Load([chunk]))) == [1, 2]
    assert len(faults) == 1
