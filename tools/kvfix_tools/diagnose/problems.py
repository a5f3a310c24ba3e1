"""Find the known problems that a line of a log shows."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvfix_tools.diagnose.problem import NAMES, Problem, catalogue, find
from kvfix_tools.diagnose.signs import (
    Died,
    Failed,
    Logged,
    Sign,
    Stuck,
    fits,
    longest,
    pattern,
)

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

__all__ = ["LINES", "NAMES", "Problem", "at", "catalogue", "find", "general", "quoted"]
#: Kinds of lines that can show a problem.
LINES = ("logged", "raised", "died", "stack")


@lru_cache(maxsize=1)
def _particular() -> tuple[Problem, ...]:
    return tuple(each for each in catalogue() if not each.general)


@lru_cache(maxsize=1)
def _general() -> tuple[Problem, ...]:
    return tuple(each for each in catalogue() if each.general)


def general(line: LogLine) -> Problem | None:
    """Return the general record that fits this line, with the longest sign if several fit."""
    best, length = None, -1
    for each in _general():
        text = max((len(longest(sign.text)) for sign in each.shows if fits(sign, line) is not None), default=-1)
        if text > length:
            best, length = each, text
    return best


def at(line: LogLine) -> tuple[Problem, ...]:
    """Return the specific records whose signs fit the line, whatever ran. Results of repeated lines are cached."""
    if line.name == "logged":
        return _logged(line.body[:2000])
    fields = line.fields
    # The outer frames are part of the key, because signs with `via` need them.
    frames = fields.get("frames", ())
    key = (line.name, fields.get("type"), _NUMBER.sub(_alike, line.body[:400]), fields.get("source"), *frames)
    if key not in _RAISED:
        if len(_RAISED) >= _MOST:
            _RAISED.clear()
        text = fields.get("text", "")
        found = {
            each.code: each
            for each, sign, part in _may_show(line.name, fields.get("type", ""))
            if (line.name != "raised" or part in text) and fits(sign, line) is not None
        }
        _RAISED[key] = tuple(found.values())
    return _RAISED[key]


def quoted(record: Problem, log: Diagnosis, line: LogLine) -> Problem | None:
    """Return the record of the error that this statement quotes; None if there is none."""
    known = _of_error(str((record.values(line) or {}).get("error", "")), line) if record.quotes else None
    return known if known is not None and known.concerns(log) else None


def _of_error(error: str, line: LogLine) -> Problem | None:
    kind, colon, text = error.partition(": ")
    named = colon and kind.isidentifier() and kind.endswith(("Error", "Exception"))
    fields = {"type": kind if named else "", "class": "", "text": text if named else error, "source": "", "frames": []}
    raised = replace(line, name="raised", fields=fields, body=error.encode())
    return next(iter(at(raised)), None) or general(raised) or general(replace(line, body=error.encode()))


def _alike(number: re.Match[bytes]) -> bytes:
    """Replace every number or id by 7, except numbers in a sign."""
    return number[0] if number[0] in _asked_for() else b"7"


@lru_cache(maxsize=1)
def _asked_for() -> frozenset[bytes]:
    signs = (sign for each in _particular() for sign in each.shows if not isinstance(sign, Logged))
    return frozenset(number for sign in signs for number in _NUMBER.findall(sign.text.encode()))


@lru_cache(maxsize=256)
def _may_show(name: str, kind: str) -> list[tuple[Problem, Sign, str]]:
    """Return (record, sign, longest part of its text without a value) for errors of this class."""
    return [
        (each, sign, longest(sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, _SIGNS[name]) and getattr(sign, "kind", "") in ("", kind)
    ]


#: {exception with its frames: its records}, because exceptions repeat.
_RAISED: dict[tuple[Any, ...], tuple[Problem, ...]] = {}
#: Maximum number of exceptions in the cache.
_MOST = 4096
_DIGITS, _NUMBER = re.compile(rb"\d+"), re.compile(rb"\d[0-9a-f]*")
_SIGNS: dict[str, tuple[type, ...]] = {"raised": (Failed, Died), "died": (Died,), "stack": (Stuck,)}


@lru_cache(maxsize=4096)
def _logged(body: bytes) -> tuple[Problem, ...]:
    return _logged_alike(_DIGITS.sub(b"7", body))


@lru_cache(maxsize=4096)
def _logged_alike(body: bytes) -> tuple[Problem, ...]:
    """Return the records for a body whose digits are all replaced by 7."""
    text = body.decode("utf-8", "replace")
    found = {each.code: each for each, sign, part in _signs() if part in text and pattern(sign).search(text)}
    return tuple(found.values())


@lru_cache(maxsize=1)
def _signs() -> tuple[tuple[Problem, str, str], ...]:
    """Return (problem, logged text with all digits replaced by 7, its longest part without a value)."""
    texts = [
        (each, re.sub(r"\d+", "7", sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, Logged)
    ]
    return tuple((each, text, longest(text)) for each, text in texts)
