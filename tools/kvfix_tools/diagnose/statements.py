"""Read the logging statements (`statements.json`) and the checks (`checks.json`) of all known releases.

A statement has the level of a log line, and the line number of the logging call in each release. A check is a raise, an
assertion or an error log in a connector. A check has the condition that decides if the code fails, and the releases
with the code. If no known problem explains a failure, kvfix reports the check. `make statements` writes both files.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvfix_tools.diagnose import grammar
from kvfix_tools.diagnose.log_line import LogLine, without_place

NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}
FILE, CHECKS = (Path(__file__).with_name(name) for name in ("statements.json", "checks.json"))
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrs]|%%")
_PLACE = re.compile(rf"{_CONVERSION.pattern}|\{{\}}")
#: A text identifies a line if it has _TELLS characters outside values. `_fits` needs one piece with _TELLS characters.
_TELLS = 16
_QUOTES, _VALUE = str.maketrans({'"': "'", " ": None, "\n": None}), "\0"
_NO_ATTRIBUTE = re.compile(r"(?:' object|^module '[\w.]+') has no attribute '")


class Statement(NamedTuple):
    """A logging statement. `template` has `%s` or `{}` per value. level: like `info`. lines: {release: line numbers}"""

    message: str
    template: str
    level: str
    file: str
    lines: dict[str, tuple[int, ...]]


def sample(template: str, value: str = "7") -> str:
    """Return the template with `value` in place of every placeholder."""
    return _PLACE.sub(lambda place: "%" if place[0] == "%%" else value, template)


@lru_cache(maxsize=1)
def known() -> dict[str, list[Statement]]:
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
    """Return the levels at which this release logs the message, or an empty set if it never logs the message."""
    return {row.level for rows in known().values() for row in rows if row.message == message and release in row.lines}


@lru_cache(maxsize=1024)
def releases_at(message: str, file: str, line: int) -> frozenset[str]:
    """Return the LMCache releases that have this statement at this line of this file."""
    rows = (row for row in known()["lmcache"] if row.message == message and row.file == file)
    return frozenset(release for row in rows for release, lines in row.lines.items() if line in lines)


class Check(NamedTuple):
    """A check. `kind` is an exception class, `assert`, or "" for a logged error. `text` has a placeholder per value.

    condition: the condition of the assertion, or of the `if` statement that leads to the raise or the log.
    """

    kind: str
    text: str
    condition: str


#: For each (file below the package, function, check), the releases that have the check.
Table = dict[tuple[str, str, Check], set[str]]


def table(data: dict[str, Any]) -> Table:
    """Return the table of one distribution, whose entry in checks.json is `data`."""
    releases = data["releases"]
    return {
        (file, function, Check(*row[:3])): {
            release for first, last in zip(row[3::2], row[4::2], strict=True) for release in releases[first : last + 1]
        }
        for file, functions in data["files"].items()
        for function, rows in functions.items()
        for row in rows
    }


@lru_cache(maxsize=1)
def checks() -> dict[str, tuple[list[str], Table]]:
    """Return {distribution: (releases, table of checks)}. The oldest release is first."""
    return {dist: (data["releases"], table(data)) for dist, data in json.loads(CHECKS.read_text()).items()}


def said_of(line: LogLine, release_of: Callable[[str], str | None]) -> str:
    """Return the end of a sentence: why the code failed, and which releases have this code. Return "" if unknown."""
    for dist, (releases, table) in checks().items():
        found = [each for each in table if _shows(each, dist, line)]
        # Also count releases that have the same code in another file.
        alike = {_alike(place) for place in found}
        having = {release for place, some in table.items() if _alike(place) in alike for release in some}
        if len({function for _, function, _ in found}) == 1:
            of_another = release_of(dist) in set(releases) - having
            span = "" if of_another else _releases(NAMES[dist], releases, having)
            return _condition({check for *_, check in found}) + span
    return ""


def _shows(place: tuple[str, str, Check], dist: str, line: LogLine) -> bool:
    file, function, check = place
    if line.name == "logged":
        return not check.kind and _fits(check.text, without_place(line.body), tells=True)
    fields = line.fields
    if line.name != "raised" or fields["type"] != ("AssertionError" if check.kind == "assert" else check.kind or None):
        return False
    if not fields["frames"]:
        # Python itself raises AttributeError with equal texts for many objects, so the text identifies no check.
        return not _NO_ATTRIBUTE.search(fields["text"]) and _fits(check.text, fields["text"], tells=True)
    path, _, within = fields["frames"][-1]
    if within != function or not f"/{path}".endswith(f"/{dist}/{file}"):
        return False
    if check.text or fields["text"]:
        return _fits(check.text, fields["text"])
    source = fields["source"].translate(_QUOTES).removeprefix("assert")
    return bool(source) and check.condition.translate(_QUOTES).startswith(source)


def _fits(text: str, said: str, tells: bool = False) -> bool:
    parts = sample(text, _VALUE).split(_VALUE)
    if not text or (tells and max(map(len, parts)) < _TELLS) or max(parts, key=len) not in said:
        return False
    return re.match(".*?".join(map(re.escape, parts)), said, re.DOTALL) is not None


def _alike(place: tuple[str, str, Check]) -> tuple[str, ...]:
    _, function, check = place
    return (check.kind, check.text) if check.text else (check.kind, check.condition, function)


def _condition(checks: set[Check]) -> str:
    conditions = {(check.kind == "assert", check.condition) for check in checks if check.condition and check.text}
    if len(conditions) != 1:
        return ""
    (holds, condition), *_ = conditions
    return f", because this was {'false' if holds else 'true'}: `{condition}`"


def _releases(name: str, releases: list[str], having: set[str]) -> str:
    ordered = [each for each in releases if each in having]
    first, last = ordered[0], ordered[-1]
    span = f"in {first}" if first == last else f"from {first} to {last}"
    if last == releases[-1]:
        return f"; {name} has this code {span}, the newest known release, so an upgrade does not help"
    after = releases[releases.index(last) + 1]
    return f"; {name} has this code {span}, but not in {after}, which may still have the cause"


@lru_cache(maxsize=1024)
def whole_statement(body: bytes) -> str | None:
    """Return the kind of line (a name in `grammar`, or "logged") if a release logs exactly this text, else None."""
    text = " ".join(body.decode("utf-8", "replace").split())
    for name, longest, pattern in _statements():
        if longest in text and pattern.fullmatch(text):
            return name
    return None


@lru_cache(maxsize=1)
def _statements() -> list[tuple[str, str, re.Pattern[str]]]:
    """For each logging statement, return the kind of line, the longest part without a value, and the pattern."""
    read = {message.name for message in grammar.MESSAGES if message.source in ("lmcache", "vllm")}
    templates = [
        (row.message, sample(row.template, _VALUE)) for rows in known().values() for row in rows if row.message in read
    ]
    templates += [
        ("logged", sample(check.text, _VALUE))
        for _, table in checks().values()
        for *_, check in table
        if not check.kind
    ]
    made = []
    for name, template in dict.fromkeys(templates):
        parts = " ".join(template.strip().partition("\n")[0].split()).split(_VALUE)
        if sum(map(len, parts)) >= _TELLS:
            made.append((name, max(parts, key=len), re.compile(".{0,600}?".join(map(re.escape, parts)))))
    return made
