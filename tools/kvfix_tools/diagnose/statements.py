"""The releases' own logging statements and assertion texts that the grammar reads: `statements.json`.

From it come the level of a line (what a log cannot show), the release that a statement's line number gives away, and
samples for tests. `make statements` writes it (tools/maintain/logging_statements.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("statements.json")
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrs]|%%")
_PLACE = re.compile(rf"{_CONVERSION.pattern}|\{{\}}")


class Statement(NamedTuple):
    """template: with `{}` where a value comes. level: of logging, or what else it is. lines: {release: where}."""

    message: str
    template: str
    level: str
    file: str
    lines: dict[str, tuple[int, ...]]


def filled(template: str, values: Iterator[str]) -> str:
    """The text as it is printed, with these values in its places."""
    return _PLACE.sub(lambda place: "%" if place[0] == "%%" else next(values), template)


def sample(template: str, value: str = "7") -> str:
    """The text as it is printed, with this for every value."""
    return filled(template, repeat(value))


@lru_cache(maxsize=1)
def known() -> dict[str, list[Statement]]:
    """{dist: its statements}"""
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
    """The levels at which this release logs the message; empty: it does not."""
    return {row.level for rows in known().values() for row in rows if row.message == message and release in row.lines}


@lru_cache(maxsize=1)
def _places() -> dict[tuple[str, str, int], frozenset[str]]:
    places: dict[tuple[str, str, int], set[str]] = {}
    for row in known()["lmcache"]:
        for release, lines in row.lines.items():
            for line in lines:
                places.setdefault((row.message, row.file, line), set()).add(release)
    return {place: frozenset(releases) for place, releases in places.items()}


def releases_at(message: str, file: str, line: int) -> frozenset[str]:
    """LMCache releases whose statement of this message stands at this line of this file."""
    return _places().get((message, file, line), frozenset())
