"""The logging statements and assertion texts of the releases that the grammar reads: `statements.json`.

They give the level of a line, the releases that have a statement at a line number, and samples for tests.
`make statements` writes the file (tools/maintain/statements.py).
"""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

#: {dist: its name for people}
NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}
FILE = Path(__file__).with_name("statements.json")
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrs]|%%")
_PLACE = re.compile(rf"{_CONVERSION.pattern}|\{{\}}")


class Statement(NamedTuple):
    """A statement. template: has `{}` for each value. level: of logging, or `assert` ... lines: {release: numbers}."""

    message: str
    template: str
    level: str
    file: str
    lines: dict[str, tuple[int, ...]]


def sample(template: str, value: str = "7") -> str:
    """Return the printed text with this value for every value."""
    return _PLACE.sub(lambda place: "%" if place[0] == "%%" else value, template)


@lru_cache(maxsize=1)
def known() -> dict[str, list[Statement]]:
    """Return {distribution: its statements}."""
    return {
        dist: [Statement(row[0], row[1], row[2], row[3], _by_release(row[4])) for row in rows]
        for dist, rows in json.loads(FILE.read_text()).items()
    }


def _by_release(by_line: dict[str, list[str]]) -> dict[str, tuple[int, ...]]:
    lines: dict[str, tuple[int, ...]] = {}
    for line, releases in by_line.items():
        for release in releases:
            lines[release] = (*lines.get(release, ()), int(line))
    return lines


def levels(message: str, release: str) -> set[str]:
    """Return the levels at which this release logs the message; empty if it does not log it."""
    return {row.level for rows in known().values() for row in rows if row.message == message and release in row.lines}


@lru_cache(maxsize=1024)
def releases_at(message: str, file: str, line: int) -> frozenset[str]:
    """Return the LMCache releases that have this statement at this line of this file."""
    rows = (row for row in known()["lmcache"] if row.message == message and row.file == file)
    return frozenset(release for row in rows for release, lines in row.lines.items() if line in lines)
