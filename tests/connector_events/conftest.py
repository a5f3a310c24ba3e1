"""Provide a fixture that runs `kvfix replay` on recorder files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import replay


class Replayed:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def engines(self, paths: Iterable[Path]) -> list[dict[str, Any]]:
        """Return each engine's JSON, plus its violations (`violated`) and the number of other findings (`unknown`)."""
        self._capsys.readouterr()
        code = replay.replay(list(paths), json=True)
        answer: Any = json.loads(self._capsys.readouterr().out)
        rows = answer if isinstance(answer, list) else [answer]
        for row in rows:
            row["violated"] = [found for found in row["findings"] if found["verdict"] == "violated"]
            row["unknown"] = len(row["findings"]) - len(row["violated"])
        assert code == int(any(row["violated"] for row in rows))
        return rows

    def __call__(self, paths: Iterable[Path]) -> dict[str, Any]:
        (engine,) = self.engines(paths)
        return engine

    def violated(self, paths: Iterable[Path]) -> list[tuple[str, str]]:
        return [(each["code"], each["request"]) for row in self.engines(paths) for each in row["violated"]]

    def text(self, paths: Iterable[Path], code: int = 0, **more: Any) -> str:
        self._capsys.readouterr()
        assert replay.replay(list(paths), json=False, **more) == code
        printed = self._capsys.readouterr()
        return printed.err if code == 2 else printed.out


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str]) -> Replayed:
    return Replayed(capsys)
