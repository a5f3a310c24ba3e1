"""The releases' own logging statements and assertion texts that the grammar reads: `statements.json`.

    python -m kvfix_tools.diagnose.statements lmcache DIR/0.3.1 DIR/0.3.2 ...
    python -m kvfix_tools.diagnose.statements vllm DIR/0.9.2=.../site-packages ...

keeps what is there of other releases. From it come the level of a line (what a log cannot show), the release that a
statement's line number gives away, and samples for tests and for lnav.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvfix_tools.diagnose import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).with_name("statements.json")
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrs]|%%")


class Statement(NamedTuple):
    """template: with `{}` where a value comes. level: of logging, or what else it is. lines: {release: where}."""

    message: str
    template: str
    level: str
    file: str
    lines: dict[str, tuple[int, ...]]


class Call(NamedTuple):
    """One statement in a file."""

    node: ast.stmt | ast.Call
    text: ast.expr
    level: str


def template(node: ast.expr) -> str | None:
    """The text with `{}` for every value, whether by `%` or as an f-string; None if it is not written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def calls(tree: ast.Module) -> Iterator[Call]:
    """Logging calls, `assert ..., text`, `raise X(text)`, and texts that are given a name first, of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            level = node.func.attr.removesuffix("_once")
            if level in _LEVELS:
                yield Call(node, node.args[0], "error" if level == "exception" else level)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield Call(node, node.msg, "assert")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield Call(node, node.exc.args[0], "raise")
        elif isinstance(node, ast.Assign):
            yield Call(node, node.value, "text")


def sample(text: str, value: str = "7") -> str:
    """The text as it is printed, with this for every value."""
    return _CONVERSION.sub(lambda found: "%" if found[0] == "%%" else value, text).replace("{}", value)


def meaning(text: str) -> str | None:
    """Name of the message that the grammar takes this text for."""
    line = sample(text).encode()
    for message in grammar.MESSAGES:
        if message.source != "trace" and message.literal in line and message.pattern.match(line):
            return message.name
    return None


def extract(source: bytes) -> list[tuple[str, str, str, int]]:
    """(message, template, level, line) of each statement of a file that the grammar reads."""
    if not any(message.literal[:8].strip() in source for message in grammar.MESSAGES if message.source != "trace"):
        return []
    found = []
    for call in calls(ast.parse(source)):
        text = template(call.text)
        name = meaning(text) if text else None
        if text is not None and name is not None:
            found.append((name, text, call.level, call.node.lineno))
    return found


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
    """At which levels this release says it; empty: it does not."""
    rows = [row for rows in known().values() for row in rows if row.message == message and release in row.lines]
    return {row.level for row in rows}


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


def main(dist: str, folders: list[str]) -> None:
    """Take the statements of these releases, and write them to the file."""
    table: dict[tuple[str, str, str, str], dict[str, tuple[int, ...]]]
    table = {(row.message, row.template, row.level, row.file): row.lines for row in _read().get(dist, [])}
    for folder in folders:
        name, _, place = folder.partition("=")
        root = Path(place or name) / dist
        release = Path(name).name
        for lines in table.values():
            lines.pop(release, None)
        for file in sorted(root.rglob("*.py")):
            for message, text, level, line in extract(file.read_bytes()):
                lines = table.setdefault((message, text, level, file.name), {})
                lines[release] = (*lines.get(release, ()), line)
        print(f"{dist} {release}: {sum(release in lines for lines in table.values())} statements", file=sys.stderr)
    rows = []
    for key, lines in sorted(table.items()):
        by_line: dict[str, list[str]] = {}
        for release, places in lines.items():
            for line in places:
                by_line.setdefault(str(line), []).append(release)
        if by_line:
            rows.append([*key, by_line])
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    data[dist] = rows
    body = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in sorted(data.items())
    )
    FILE.write_text("{" + body + "}\n")


def _read() -> dict[str, list[Statement]]:
    return known() if FILE.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
