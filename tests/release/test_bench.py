"""`make bench`: what was measured is not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.bench.__main__ import measured
from tests.bench.row import Row

ROW = Row("speed", 2.0, "x", "nothing", at_least=1)


def bench(error: BaseException | None = None) -> Callable[[], Iterator[Row]]:
    def measure() -> Iterator[Row]:
        yield ROW
        if error is not None:
            raise error

    return measure


@pytest.mark.parametrize(("error", "rows"), [(TimeoutError("planted"), 2), (KeyboardInterrupt("planted"), 1)])
def test_what_was_measured_before_it_failed_or_was_stopped_is_shown(
    error: BaseException, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[str] = []
    assert list(measured([("fails", bench(error)), ("whole", bench())], failed)) == [ROW] * rows
    assert failed == ["fails"]
    assert f"{type(error).__name__}: planted" in capsys.readouterr().err
