"""`make statements`: collect for kvfix-diagnose the texts that the code of each release logs or raises.

`kvfix_tools/diagnose/statements.json` has the texts that the grammar reads, such as log lines and assertion texts.
`checks.json` has exceptions, assertions and logged errors. The program keeps the entries of other releases.

    python -m maintain statements lmcache DIR/0.3.1 DIR/0.3.2 ...
    python -m maintain statements vllm DIR/0.9.2=.../site-packages ...
"""

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from kvfix_tools.diagnose import grammar, statements
from kvfix_tools.diagnose.statements import Check

ERRORS = ("error", "critical", "exception")
LEVELS = ("debug", "info", "warning", *ERRORS)
#: Folders and files of vLLM whose exceptions, assertions and logged errors are in checks.json.
VLLM = (
    "distributed/kv_transfer/", "distributed/kv_events.py", "v1/core/", "v1/kv_offload/", "v1/simple_kv_offload/",
    "v1/worker/kv_connector", "v1/worker/gpu_model_runner.py", "v1/worker/gpu/kv_connector", "v1/engine/core",
    "v1/executor/", "config/vllm.py", "config/kv_transfer.py", "config/cache.py", "config/parallel.py",
)  # fmt: skip
#: {(message, template, level, file): {release: lines}}
Table = dict[tuple[str, str, str, str], dict[str, tuple[int, ...]]]
_TEXT, _CONDITION = 200, 120  # maximum characters of a text and of a condition


def template(node: ast.expr | None) -> str | None:
    """Return the text of a string. In an f-string, `{}` replaces each value. Return None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def said(node: ast.AST) -> tuple[str, ast.expr | None]:
    """Return (level, text) of a logging call, assertion, exception or assignment. Return ("", None) for other code."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[text, *_]) if name.removesuffix("_once") in LEVELS:
            return name.removesuffix("_once"), text
        case ast.Assert(msg=text):
            return "assert", text
        case ast.Raise(exc=ast.Call(args=[text, *_])):
            return "raise", text
        case ast.Assign(value=text):  # later code may log or raise this text
            return "text", text
    return "", None


def statements_in(source: bytes) -> list[tuple[str, str, str, int]]:
    """Return (name of the message, template, level, line) for each statement that a message of the grammar matches."""
    if not any(message.literal[:8].strip() in source for message in grammar.MESSAGES):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        level, expression = said(node)
        text = template(expression)
        line = statements.sample(text).encode() if text else b""
        meant = (each.name for each in grammar.MESSAGES if each.literal in line and each.pattern.match(line))
        if text and (name := next(meant, None)) and isinstance(node, ast.stmt | ast.expr):
            found.append((name, text, "error" if level == "exception" else level, node.lineno))
    return found


def take_statements(table: Table, release: str, root: Path) -> None:
    """In the table, replace the statements of this release by the statements in the package's folder `root`."""
    for lines in table.values():
        lines.pop(release, None)
    for file in sorted(root.rglob("*.py")):
        for message, text, level, line in statements_in(file.read_bytes()):
            lines = table.setdefault((message, text, level, file.name), {})
            lines[release] = (*lines.get(release, ()), line)


def rows(table: Table) -> list[list[object]]:
    """Return the rows of statements.json: [message, template, level, file, {line: releases, oldest first}]."""
    made: list[list[object]] = []
    for key, lines in sorted(table.items()):
        by_line: dict[str, list[str]] = {}
        for release in sorted(lines, key=Version):
            for line in lines[release]:
                by_line.setdefault(str(line), []).append(release)
        if by_line:
            made.append([*key, by_line])
    return made


def with_place(node: ast.AST, function: str = "<module>", condition: str = "") -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (node, name of the enclosing function, condition of the innermost `if`) for all nodes below `node`."""
    for name, value in ast.iter_fields(node):
        leads = ast.unparse(node.test) if isinstance(node, ast.If) and name == "body" else condition
        if isinstance(node, ast.If) and name == "orelse":
            leads = ""
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                own = (getattr(child, "name", ""), "") if is_function else (function, leads)
                yield child, *own
                yield from with_place(child, *own)


def checks_in(source: bytes) -> Iterator[tuple[str, Check]]:
    for node, function, condition in with_place(ast.parse(source)):
        level, expression = said(node)
        text = template(expression) or ""
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
        elif isinstance(node, ast.Assert):
            kind, condition = "assert", ast.unparse(node.test)
        elif isinstance(node, ast.Call) and level in ERRORS and "log" in ast.unparse(node.func).rpartition(".")[0]:
            kind = ""
        else:
            continue
        if text or kind == "assert":
            yield function, Check(kind, text[:_TEXT], condition[:_CONDITION])


def take_checks(table: statements.Table, release: str, package: Path) -> None:
    """In the table, replace the checks of this release by the checks in the package's folder."""
    for found in table.values():
        found.discard(release)
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if path.startswith(VLLM) if package.name == "vllm" else not path.startswith(("cli/", "tools/", "sdk/")):
            for function, check in checks_in(file.read_bytes()):
                table.setdefault((path, function, check), set()).add(release)


def _ranges(numbers: Iterable[int]) -> list[int]:
    """Return the first and the last number of each run of consecutive numbers: [0, 1, 2, 7] becomes [0, 2, 7, 7]."""
    found = set(numbers)
    firsts, lasts = (sorted(each for each in found if each + step not in found) for step in (-1, 1))
    return [end for run in zip(firsts, lasts, strict=True) for end in run]


def as_data(table: statements.Table) -> dict[str, object]:
    """Return the data of checks.json: releases, and {source file: {function: [[kind, text, condition, *ranges]]}}."""
    releases = sorted({release for found in table.values() for release in found}, key=Version)
    files: dict[str, dict[str, list[list[object]]]] = {}
    for (file, function, check), found in sorted(table.items()):
        if found:
            numbers = [releases.index(each) for each in found]
            files.setdefault(file, {}).setdefault(function, []).append([*check, *_ranges(numbers)])
    return {"releases": releases, "files": files}


def main(dist: str, folders: list[str]) -> None:
    data, kept = (json.loads(file.read_text()) for file in (statements.FILE, statements.CHECKS))
    known = statements.known()[dist]
    table: Table = {(row.message, row.template, row.level, row.file): dict(row.lines) for row in known}
    found = statements.table(kept[dist])
    for folder in folders:
        name, _, place = folder.partition("=")
        release, package = Path(name).name, Path(place or name) / dist
        take_statements(table, release, package)
        take_checks(found, release, package)
        counts = (sum(release in releases for releases in each.values()) for each in (table, found))
        print(dist, release, "{} statements, {} checks".format(*counts), file=sys.stderr)
    data[dist], kept[dist] = rows(table), as_data(found)
    _write(statements.FILE, data, lambda made: _lines("[]", map(json.dumps, made)))
    _write(statements.CHECKS, kept, _of_checks)


def _of_checks(made: Any) -> str:
    files = (f"{json.dumps(file)}: {json.dumps(found)}" for file, found in made["files"].items())
    return f'{{"releases": {json.dumps(made["releases"])}, "files": {_lines("{}", files)}}}'


def _write(file: Path, data: dict[str, Any], text_of: Callable[[Any], str]) -> None:
    file.write_text("{" + ",\n".join(f'"{dist}": {text_of(made)}' for dist, made in sorted(data.items())) + "}\n")


def _lines(brackets: str, rows: Iterable[str]) -> str:
    """Return a JSON list or object with each row in its own line."""
    return f"{brackets[0]}\n" + ",\n".join(rows) + f"\n{brackets[1]}"
