"""`make statements`: write exceptions, assertions and logged errors of the releases to
`kvfix_tools/diagnose/checks.json`.

If no known problem explains a failure, kvfix-diagnose names the releases that have the code of the failed check.
Entries of other releases stay in the file.

    python -m maintain.released_checks lmcache DIR/0.3.1 DIR/0.3.2 ...
    python -m maintain.released_checks vllm DIR/0.9.2=.../site-packages ...

"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from kvfix_tools.diagnose import checks
from kvfix_tools.diagnose.checks import Check
from maintain.logging_statements import template

#: Folders and files of vLLM that are read, and those of LMCache that are not.
VLLM = (
    "distributed/kv_transfer/", "distributed/kv_events.py", "v1/core/", "v1/kv_offload/", "v1/simple_kv_offload/",
    "v1/worker/kv_connector", "v1/worker/gpu_model_runner.py", "v1/worker/gpu/kv_connector", "v1/engine/core",
    "v1/executor/", "config/vllm.py", "config/kv_transfer.py", "config/cache.py", "config/parallel.py",
)  # fmt: skip
_NOT_LMCACHE = ("cli/", "tools/", "sdk/")
_ERRORS = ("error", "exception", "critical")
#: Maximum characters of a text and of a condition.
_TEXT, _CONDITION = 200, 120


def with_place(node: ast.AST, function: str = "<module>", condition: str = "") -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (node, its function, its innermost `if`) of all nodes below this one."""
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


def extract(source: bytes) -> Iterator[tuple[str, Check]]:
    """Yield (function, check) of each check of a file."""
    for node, function, condition in with_place(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind, text = ast.unparse(node.exc.func).rpartition(".")[2], template(node.exc.args[0])
        elif isinstance(node, ast.Assert):
            kind, text, condition = "assert", template(node.msg) if node.msg else "", ast.unparse(node.test)
        elif isinstance(node, ast.Call) and _logs_error(node):
            kind, text = "", template(node.args[0])
        else:
            continue
        if text or kind == "assert":
            yield function, Check(kind, (text or "")[:_TEXT], condition[:_CONDITION])


def _logs_error(node: ast.Call) -> bool:
    called = node.func
    return bool(
        isinstance(called, ast.Attribute)
        and called.attr.removesuffix("_once") in _ERRORS
        and "log" in ast.unparse(called.value)
        and node.args
    )


def take(table: checks.Table, release: str, package: Path) -> int:
    """Replace the checks of this release in the table by those of this package. Return their number."""
    for found in table.values():
        found.discard(release)
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if path.startswith(VLLM) if package.name == "vllm" else not path.startswith(_NOT_LMCACHE):
            for function, check in extract(file.read_bytes()):
                table.setdefault((path, function, check), set()).add(release)
    return sum(release in found for found in table.values())


def _ranges(numbers: Iterable[int]) -> list[int]:
    """Return the first and last number of each run: [0, 1, 2, 7] becomes [0, 2, 7, 7]."""
    made: list[int] = []
    for number in sorted(numbers):
        if made and made[-1] == number - 1:
            made[-1] = number
        else:
            made += [number, number]
    return made


def as_data(table: checks.Table) -> dict[str, object]:
    """Return the data of the file: sorted releases, and {file: {function: [[kind, text, condition, *ranges]]}}."""
    releases = sorted({release for found in table.values() for release in found}, key=Version)
    files: dict[str, dict[str, list[list[object]]]] = {}
    for (file, function, check), found in sorted(table.items()):
        if found:
            numbers = [releases.index(each) for each in found]
            files.setdefault(file, {}).setdefault(function, []).append([*check, *_ranges(numbers)])
    return {"releases": releases, "files": files}


def main(dist: str, folders: list[str]) -> None:
    """Take the checks of these releases, and write them to the file."""
    data = json.loads(checks.FILE.read_text()) if checks.FILE.exists() else {}
    table = checks.table(data[dist]) if dist in data else {}
    for folder in folders:
        name, _, place = folder.partition("=")
        release = Path(name).name
        print(f"{dist} {release}: {take(table, release, Path(place or name) / dist)} checks", file=sys.stderr)
    data[dist] = as_data(table)
    parts = []
    for name, kept in sorted(data.items()):
        files = ",\n".join(f"{json.dumps(file)}: {json.dumps(rows)}" for file, rows in kept["files"].items())
        parts.append(f'"{name}": {{"releases": {json.dumps(kept["releases"])}, "files": {{\n{files}\n}}}}')
    checks.FILE.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
