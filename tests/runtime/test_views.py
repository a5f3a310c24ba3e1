"""Objects that a fix puts in the place of an engine's object: they differ in one attribute, and cannot raise."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvfix.fixes.lmcache import kvf018_loaded_chunks_unpinned_twice as kvf018
from kvfix.fixes.lmcache_mp import kvf103_mp_retrieve_false as kvf103
from kvfix.fixes.lmcache_mp import kvf105_mp_abort_before_alloc as kvf105
from kvfix.fixes.lmcache_mp import kvf109_mp_freed_while_stored as kvf109
from kvfix.fixes.lmcache_mp import kvf117_mp_ended_ids_kept as kvf117
from kvfix.wrapping import View, replaced


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


def test_a_view_is_the_object_except_for_the_replaced_attributes() -> None:
    request = SimpleNamespace(status="aborted", request_id="r")
    view = View(request, status=None)
    assert (view.status, view.request_id) == (None, "r")
    view.noted = 1
    assert request.noted == 1
    assert request.status == "aborted"
    with pytest.raises(AttributeError):
        view.nothing  # noqa: B018


def test_replaced_attributes_are_restored() -> None:
    owner = SimpleNamespace(one=1)
    with replaced(owner, one=2, other=3):
        assert (owner.one, owner.other) == (2, 3)
        del owner.other
    assert vars(owner) == {"one": 1}


def test_a_failed_load_answers_even_if_it_cannot_be_recorded(faults: dict[str, int]) -> None:
    """A worker without the list of failed blocks."""
    load = kvf103.load(SimpleNamespace(), Future(False), [3])
    assert load.result(timeout=1, strict=True) is False
    assert load.cancel() == "cancelled"
    assert list(faults) == [
        "a fault of kvfix itself in kvfix.fixes.lmcache_mp.kvf103_mp_retrieve_false.load: AttributeError"
    ]


def test_two_stores_as_one() -> None:
    both = kvf109.both(Future(True), Future(False))
    assert (both.query(), both.wait(1), both.result(strict=True)) == (False, False, False)
    assert both.cancel() == "cancelled"


def test_a_thousand_stores_as_one() -> None:
    """A long prompt in small steps. `query` of one future within another ended in a RecursionError."""
    stores = [Future(False) for _ in range(5000)]
    both: Any = stores[0]
    for store in stores[1:]:
        both = kvf109.both(both, store)
    assert both.query() is False
    for store in stores[:-1]:
        store.answer = True
    assert both.query() is False
    stores[-1].answer = True
    assert both.query() is True


def test_a_session_is_kept_for_calls_by_position_and_by_name() -> None:
    ended: list[Any] = []
    end = kvf105._except_for("r", lambda *args, **kwargs: ended.append((args, kwargs)))
    end("r")
    end(request_id="r")
    end("other", force=True)
    end(request_id="another")
    assert ended == [(("other",), {"force": True}), ((), {"request_id": "another"})]


class Chunk:
    def pin(self) -> None: ...


def test_a_layerwise_load_ends_even_if_a_pin_cannot_be_released(faults: dict[str, int]) -> None:
    chunk = Chunk()
    chunk.unpin = None  # type: ignore[attr-defined]
    assert list(kvf018._layers(iter([1, 2]), kvf018._Load([chunk]))) == [1, 2]
    assert len(faults) == 1


def test_recent_ids_are_a_set() -> None:
    recent = kvf117.Recent()
    recent.update({"a", "b"})
    recent.add("c")
    recent.discard("b")
    assert ("a" in recent, "b" in recent, len(recent)) == (True, False, 2)
    assert recent | {"d"} == {"a", "c", "d"}
