"""`make statements`: write the releases' log statements and assertion texts to `kvfix_tools/diagnose/statements.json`.

Only texts that the grammar of kvfix-diagnose reads are written. Entries of other releases stay in the file.

    python -m maintain.logging_statements lmcache DIR/0.3.1 DIR/0.3.2 ...
    python -m maintain.logging_statements vllm DIR/0.9.2=.../site-packages ...

"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from kvfix_tools.diagnose import grammar, statements

LEVELS = ("debug", "info", "warning", "error", "critical", "exception")


class Call(NamedTuple):
    node: ast.stmt | ast.Call
    text: ast.expr
    level: str


def template(node: ast.expr) -> str | None:
    """Return the text with `{}` for each value of `%` or of an f-string; None if the source has no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def calls(tree: ast.Module) -> Iterator[Call]:
    """Yield the logging calls, assertions and exceptions of a file that have a text, also with a text in a variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            level = node.func.attr.removesuffix("_once")
            if level in LEVELS:
                yield Call(node, node.args[0], "error" if level == "exception" else level)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield Call(node, node.msg, "assert")
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield Call(node, node.exc.args[0], "raise")
        elif isinstance(node, ast.Assign):
            yield Call(node, node.value, "text")


def meaning(text: str) -> str | None:
    """Return the name of the message that the grammar recognizes in this text."""
    line = statements.sample(text).encode()
    for message in grammar.MESSAGES:
        if message.literal in line and message.pattern.match(line):
            return message.name
    return None


def extract(source: bytes) -> list[tuple[str, str, str, int]]:
    """Return (message, template, level, line) of each statement of a file that the grammar reads."""
    if not any(message.literal[:8].strip() in source for message in grammar.MESSAGES):
        return []
    found = []
    for call in calls(ast.parse(source)):
        text = template(call.text)
        name = meaning(text) if text else None
        if text is not None and name is not None:
            found.append((name, text, call.level, call.node.lineno))
    return found


#: {(message, template, level, file): {release: lines}}
Table = dict[tuple[str, str, str, str], dict[str, tuple[int, ...]]]


def take(table: Table, release: str, root: Path) -> None:
    """Replace the statements of this release in the table by those of the package in this folder."""
    for lines in table.values():
        lines.pop(release, None)
    for file in sorted(root.rglob("*.py")):
        for message, text, level, line in extract(file.read_bytes()):
            lines = table.setdefault((message, text, level, file.name), {})
            lines[release] = (*lines.get(release, ()), line)


def rows(table: Table) -> list[list[object]]:
    """Return the rows of the file: [message, template, level, file, {line: releases}], the oldest release first."""
    made: list[list[object]] = []
    for key, lines in sorted(table.items()):
        by_line: dict[str, list[str]] = {}
        for release in sorted(lines, key=Version):
            for line in lines[release]:
                by_line.setdefault(str(line), []).append(release)
        if by_line:
            made.append([*key, by_line])
    return made


def main(dist: str, folders: list[str]) -> None:
    """Take the statements of these releases, and write them to the file."""
    known = statements.known() if statements.FILE.exists() else {}
    table: Table = {(row.message, row.template, row.level, row.file): dict(row.lines) for row in known.get(dist, [])}
    for folder in folders:
        name, _, place = folder.partition("=")
        release = Path(name).name
        take(table, release, Path(place or name) / dist)
        print(f"{dist} {release}: {sum(release in lines for lines in table.values())} statements", file=sys.stderr)
    data = json.loads(statements.FILE.read_text()) if statements.FILE.exists() else {}
    data[dist] = rows(table)
    body = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in kept) + "\n]" for name, kept in sorted(data.items())
    )
    statements.FILE.write_text("{" + body + "}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
