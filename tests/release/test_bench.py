"""`make bench`: what was measured is not lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.__main__ import measured
from tests.bench.row import Row

ROW = Row("speed", 2.0, "x", "nothing", at_least=1)


def whole() -> Iterator[Row]:
    yield ROW


def half() -> Iterator[Row]:
    yield ROW
    raise TimeoutError("planted")


def stopped() -> Iterator[Row]:
    yield ROW
    raise KeyboardInterrupt


def test_a_part_that_fails_takes_nothing_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    failed: list[str] = []
    assert list(measured([("half", half), ("whole", whole)], failed)) == [ROW, ROW]
    assert failed == ["half"]
    assert "TimeoutError: planted" in capsys.readouterr().err


def test_what_was_measured_before_it_was_stopped_is_shown() -> None:
    failed: list[str] = []
    assert list(measured([("whole", whole), ("stopped", stopped), ("whole", whole)], failed)) == [ROW, ROW]
    assert failed == ["stopped"]
