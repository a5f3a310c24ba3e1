"""Every exception that leaves a hook is reported once, whatever its id, its thread, and the hooks that it passes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvfix import patching
from kvfix.probes import alarm, hooks, recorder

#: So many that some have the id of an earlier one, on any machine.
MANY = 64


class Child:
    """A connector. Its hooks raise what they are handed."""

    def start_load_kv(self, error: Exception | None, *more: Any) -> None:
        for each in more:
            each()
        if error is not None:
            raise error


class Parent(Child):
    """As MultiConnector: it hands on to a connector of its own."""

    def __init__(self) -> None:
        self.child = Child()

    def start_load_kv(self, error: Exception | None, *more: Any) -> None:
        self.child.start_load_kv(error, *more)


class Weak(Exception):
    """One that can be asked whether it is still there."""


@pytest.fixture(autouse=True)
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(alarm, "mode", "observe")
    recorder.restart()
    for connector in (Parent, Child):
        hooks.watch_class(connector)
    yield
    patching.detach(hooks.KEY)
    recorder.restart()
    alarm.restart()


def reported() -> list[str]:
    return [entry.event.error for entry in recorder.ring]  # type: ignore[union-attr]


def test_many_in_a_row() -> None:
    """Each is gone before the next is made, which then has its id most often."""
    connector, ids = Parent(), set()
    for number in range(MANY):
        with suppress(ValueError):
            connector.start_load_kv(error := ValueError(number))
        ids.add(id(error))
        del error
        gc.collect()  # it has the frames that it has passed, and they have it
    assert reported() == [f"ValueError: {number}" for number in range(MANY)]
    assert len(ids) < MANY


def test_one_that_is_raised_again() -> None:
    """As a future does with the exception that it holds: each call has failed."""
    connector, error = Child(), ValueError("held")
    for _ in range(2):
        with pytest.raises(ValueError, match="held"):
            connector.start_load_kv(error)
    assert len(reported()) == 2


def test_nothing_of_it_is_kept() -> None:
    error: Any = Weak("large")
    kept = weakref.ref(error)
    with pytest.raises(Weak):
        Parent().start_load_kv(error)
    del error
    gc.collect()  # it has the frames that it has passed, and they have it
    assert kept() is None


def test_two_threads_in_one_connector() -> None:
    """Both calls are seen, and both exceptions."""
    connector, both = Child(), threading.Barrier(2, timeout=60)
    connector.start_load_kv(None)

    def call(name: str) -> None:
        with pytest.raises(ValueError, match=name):
            connector.start_load_kv(ValueError(name), both.wait, both.wait)

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch: Any = vars(connector)["_kvfix_watch"]
    assert watch.calls == {"start_load_kv": 3}
    assert watch.running == {}
    assert sorted(reported()) == ["ValueError: a", "ValueError: b"]
