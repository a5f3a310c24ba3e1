"""The watchdog reports each engine that stands still, once, and none that works, waits for work or computes."""

from __future__ import annotations

import os

import pytest

from kvfix.connector_events import watchdog
from tests.conftest import RELEASES, Once
from tests.engine_state import watchdog_cases as cases

NEWEST = RELEASES / "0.5.6"


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ("locked_out_engine", "KVD202 nothing-moves: 1 request is loaded and waits behind r, which needs 8 blocks; 4"),
        ("engine_without_load", "The cause is not known: see its state and stacks."),
        ("silent_server", "The cause is not known: see its state and stacks."),
    ],
)
def test_an_engine_that_stands_still(engine: str, verdict: str, once: Once) -> None:
    found = once(cases.wedge, NEWEST, engine)
    assert found["seconds"] == 65.0  # the first look only begins
    assert "no request has made progress for " in found["line"]
    assert verdict in found["line"]
    assert found["reason"] == "standstill"
    assert found["events"] > 0
    assert "r" in found["requests"]
    assert "watchdog.py" in found["stacks"]
    assert "in wedge" in found["stacks"]  # of the main thread, wherever it was


def test_a_decode_engine_that_waits_for_the_queue_of_prefill(once: Once) -> None:
    assert once(cases.queued_prefill, NEWEST) == [0.0, 70.0]  # the first two looks only begin


def test_each_standstill_is_reported_once(once: Once) -> None:
    assert once(cases.two_standstills, NEWEST) == [1, 1, 1, 2]


def test_what_is_no_hang(once: Once) -> None:
    found = once(cases.quiet, NEWEST)
    assert found.pop("not at the workers") > 0  # else the others prove nothing
    assert found == {"idle": 0.0, "load": 0.0, "a step at the workers": 0.0}
    assert once(cases.paused, NEWEST) == 0.0


def test_a_hook_that_does_not_come_back(once: Once) -> None:
    assert once(cases.in_hook, NEWEST, "build_connector_meta", 20)[1:] == ["build_connector_meta of LMCacheMPConnector"]
    assert once(cases.in_hook, NEWEST, "build_connector_meta", 2) == []


def test_one_step_that_waits_in_many_hooks(once: Once) -> None:
    """LMCache in process, of which a worker does not answer: each waiting request costs the scheduler 3 s."""
    assert once(cases.in_hook, NEWEST, "get_num_new_matched_tokens", 2, 20)[1:] == ["requests"]
    assert once(cases.in_hook, NEWEST, "get_num_new_matched_tokens", 1, 2) == []


def test_a_start_that_hangs(once: Once) -> None:
    assert once(cases.start_of_lmcache, NEWEST) == [60.0, "the start of Manager"]


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("5", 5.0), ("0", 0.0), ("-1", 0.0), ("soon", 60.0)])
def test_the_limit(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, watchdog.SECONDS, text)
    assert watchdog._limit() == seconds
