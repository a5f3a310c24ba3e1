"""kvfix records each exception once, even if two nested hooks raise it or Python reuses an earlier exception's id."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvfix import applying, connector_events
from kvfix.config import Config
from kvfix.session import session

#: With this many exceptions, some exceptions get the id of an earlier exception on any host.
MANY = 64


class Child:
    def start_load_kv(self, error: Exception | None, *more: Any) -> None:
        for each in more:
            each()
        if error is not None:
            raise error


class Parent(Child):
    """A connector that calls the hook of its child, as MultiConnector does."""

    def __init__(self) -> None:
        self.child = Child()

    def start_load_kv(self, error: Exception | None, *more: Any) -> None:
        self.child.start_load_kv(error, *more)


class Weak(Exception):
    """An exception that can be weakly referenced."""


@pytest.fixture(autouse=True)
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(session, "config", Config("observe", None, None))
    session.restart_recording()
    for connector in (Parent, Child):
        connector_events.watch_class(connector)
    yield
    applying.detach(connector_events.KEY)
    session.restart_recording()


def recorded() -> list[str]:
    return [entry.event.error for entry in session.events]  # type: ignore[union-attr]


def test_many_exceptions_in_a_row() -> None:
    """Python frees each exception before it creates the next one. Both exceptions often have the same id."""
    connector, ids = Parent(), set()
    for number in range(MANY):
        with suppress(ValueError):
            connector.start_load_kv(error := ValueError(number))
        ids.add(id(error))
        del error
        gc.collect(1)  # needed because exception and frames refer to each other; a full collection takes long
    assert recorded() == [f"ValueError: {number}" for number in range(MANY)]
    assert len(ids) < MANY


def test_an_exception_that_is_raised_again_is_recorded_twice_and_not_kept_alive() -> None:
    """A future raises the same exception at each call. Each call fails, so kvfix records one exception per call."""
    error: Any = Weak("held")
    kept = weakref.ref(error)
    for _ in range(2):
        with pytest.raises(Weak):
            Parent().start_load_kv(error)
    assert recorded() == ["Weak: held"] * 2
    del error
    gc.collect()  # needed because the exception and its frames refer to each other
    assert kept() is None


def test_two_threads_in_one_connector() -> None:
    connector, both = Child(), threading.Barrier(2, timeout=60)
    connector.start_load_kv(None)

    def call(name: str) -> None:
        with pytest.raises(ValueError, match=name):
            connector.start_load_kv(ValueError(name), both.wait, both.wait)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(call, "ab")) == [None, None]
    held: Any = vars(connector)["_kvfix_watched"]
    assert held.calls == {"start_load_kv": 3}
    assert held.running == {}
    assert sorted(recorded()) == ["ValueError: a", "ValueError: b"]
