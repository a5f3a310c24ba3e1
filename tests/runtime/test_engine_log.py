import logging
import os
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvfix import engine_log
from kvfix.fixes import _prefills
from kvfix.session import session


@pytest.fixture(autouse=True)
def now(faults: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of engine_log. A test can advance the new clock."""
    clock = [0.0]
    monkeypatch.setattr(engine_log, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    logging.getLogger("kvfix").setLevel(logging.INFO)
    return clock


def test_a_text_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        engine_log.warning("KVF001: one")
    engine_log.info("KVF001: two")
    assert caplog.messages == ["KVF001: one", "KVF001: two"]


def test_texts_of_a_kind_do_not_flood_the_log(caplog: pytest.LogCaptureFixture, now: list[float]) -> None:
    for number in range(1000):
        engine_log.warning(f"KVF325: a registration is not served: KeyError: 'engine-{number}'")
    assert len(caplog.messages) == engine_log.LINES
    engine_log.warning("KVF316: another kind")
    assert caplog.messages[-1] == "KVF316: another kind"
    now[0] += engine_log.PAUSE
    engine_log.warning("KVF325: a registration is not served: KeyError: 'later'")
    assert caplog.messages[-1] == (
        "KVF325: a registration is not served: KeyError: 'later' "
        f"({1000 - engine_log.LINES} more lines of this kind were left out before this one)"
    )
    engine_log.warning("KVF325: a registration is not served: KeyError: 'too soon'")
    assert "too soon" not in caplog.text


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes the test has allocated and not freed. Logging is off."""
    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


def test_what_is_remembered_is_bounded(memory: Callable[[], int]) -> None:
    for number in range(20_000):
        engine_log.warning(f"KVF{number}: {number} {'x' * 10_000}")
    assert memory() < 4 << 20
    assert (len(session.reported), len(session.lines)) == (engine_log.TEXTS, engine_log.KINDS)


def test_ids_of_clients_are_not_kept_whole(memory: Callable[[], int]) -> None:
    connector = SimpleNamespace()
    for number in range(1000):
        request = SimpleNamespace(request_id=f"{'r' * 10_000}{number}", kv_transfer_params={})
        assert _prefills.first(connector, ("p", f"{'x' * 100_000}{number}"), request)
    assert memory() < 1 << 20
    prefill = ("p", f"{'x' * 100_000}7")
    second = SimpleNamespace(request_id="second", kv_transfer_params={})
    assert _prefills.has_another(connector, prefill)
    assert not _prefills.first(connector, prefill, second)
    assert not _prefills.has_another(connector, ("p", "unknown"))


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_whose_text_cannot_be_read(faults: dict[str, int]) -> None:
    def fail() -> None:
        raise Unreadable

    assert engine_log.guarded("here", fail) is None
    assert list(faults) == ["a fault of kvfix itself in here: Unreadable"]


def test_a_forked_child_has_a_free_lock() -> None:
    """During the fork another thread of the parent holds the lock. The child does not have this thread."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session.lock.acquire).result()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if session.lock.acquire(blocking=False) else 1)
        _, status = os.waitpid(pid, 0)
        pool.submit(session.lock.release).result()
    assert status == 0
