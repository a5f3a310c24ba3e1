"""Lines as a release prints them: its own statement, in its own format; its own assertion, failed.

Only the values are ours. The statement is compiled where it stands, so that file and line number are its own too.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import logging
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvfix_tools.diagnose import statements
from maintain import logging_statements
from tests.conftest import RELEASES, ROOT

#: In front of each line of a traceback that EngineCore logs.
CORE = "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [core.py:7] "


class Place(NamedTuple):
    """A statement in a release. `function`: the one that it stands in."""

    release: str
    path: Path
    node: ast.stmt | ast.Call
    text: ast.expr
    level: str
    function: str


@lru_cache(maxsize=1024)
def _parsed(source: bytes) -> list[tuple[ast.stmt | ast.Call, ast.expr, str, str]]:
    tree = ast.parse(source)
    within: dict[int, str] = {}
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, function = waiting.pop()
        within[id(node)] = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]
    return [(call.node, call.text, call.level, within[id(call.node)]) for call in logging_statements.calls(tree)]


@lru_cache(maxsize=512)
def _extracted(source: bytes) -> list[tuple[str, str, str, int]]:
    return logging_statements.extract(source)


@lru_cache(maxsize=64)
def files(release: str) -> dict[str, list[Path]]:
    """{name: the files of this name in the release}"""
    found: dict[str, list[Path]] = {}
    for path in (RELEASES / release / "lmcache").rglob("*.py"):
        found.setdefault(path.name, []).append(path)
    return found


def extracted(release: str, names: set[str]) -> set[tuple[str, str, str, str, int]]:
    """(message, template, level, file, line) of each statement in the files of these names."""
    return {
        (message, text, level, name, line)
        for name in names
        for path in files(release).get(name, [])
        for message, text, level, line in _extracted(path.read_bytes())
    }


def places(release: str, message: str) -> list[Place]:
    """Where the release says this."""
    rows = [row for row in statements.known()["lmcache"] if row.message == message and release in row.lines]
    found = []
    for row in rows:
        for path in files(release)[row.file]:
            for node, text, level, function in _parsed(path.read_bytes()):
                if node.lineno in row.lines[release] and logging_statements.template(text) == row.template:
                    found.append(Place(release, path, node, text, level, function))
    return found


def statement(path: Path, words: str, release: str = "") -> Place:
    """The logging statement or assertion with these words in its text, whether the grammar reads it or not."""
    for node, text, level, function in _parsed(path.read_bytes()):
        if level != "text" and words in (logging_statements.template(text) or ""):
            return Place(release, path, node, text, level, function)
    raise AssertionError(f"{path} does not say {words!r}")


class Values:
    """Hands out values for the places of a template: those given, then numbers, each only once."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._given = list(given)
        self._next = 11
        self.used: list[str] = []

    def take(self) -> Any:
        self._next += 1
        value = self._given.pop(0) if self._given else self._next
        self.used.append(str(value))
        return value


def _filled(text: ast.expr, values: Values) -> ast.expr:
    """The f-string with values in its places; other texts as they are."""
    if isinstance(text, ast.JoinedStr):
        parts = [
            ast.FormattedValue(ast.Constant(values.take()), part.conversion, part.format_spec)
            if isinstance(part, ast.FormattedValue)
            else part
            for part in text.values
        ]
        return ast.JoinedStr(parts)
    return text


@lru_cache(maxsize=64)
def _logging_of(release: str) -> Any:
    spec = importlib.util.spec_from_file_location("lmcache_logging", RELEASES / release / "lmcache/logging.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(place: Place) -> str:
    return ".".join(place.path.relative_to(RELEASES / place.release).with_suffix("").parts)


def line(place: Place, *given: Any) -> tuple[str, list[str]]:
    """The line that the release's own formatter makes of this statement, and the values in it."""
    values = Values(given)
    text = _filled(place.text, values)
    conversions = [] if isinstance(text, ast.JoinedStr) else statements._CONVERSION.findall(place.text.value)  # type: ignore[attr-defined]
    arguments = [ast.Constant(values.take()) for each in conversions if each != "%%"]
    call = ast.Call(ast.Attribute(ast.Name("logger", ast.Load()), place.level, ast.Load()), [text, *arguments], [])
    code = ast.Module([ast.Expr(call)], [])
    _at(code, place.node.lineno)
    logger = logging.Logger(_module(place))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_logging_of(place.release).CustomFormatter())
    logger.addHandler(handler)
    exec(compile(code, str(place.path), "exec"), {"logger": logger})
    return stream.getvalue(), values.used


def _at(code: ast.Module, lineno: int) -> None:
    for node in ast.walk(code):
        if "lineno" in node._attributes:
            node.lineno = node.end_lineno = lineno  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]


def fail(place: Place, *given: Any, prefix: str = CORE) -> str:
    """The traceback of this `assert` or `raise`, in its file, line and function, as EngineCore logs it."""
    values = Values(given)
    raised: ast.stmt
    if isinstance(place.node, ast.Assert):
        raised = ast.Assert(ast.Constant(False), _filled(place.text, values))
    else:
        own = place.node.exc.func if isinstance(place.node, ast.Raise) else None  # type: ignore[union-attr]
        raised = ast.Raise(
            ast.Call(own or ast.Name("ConnectionError", ast.Load()), [_filled(place.text, values)], []), None
        )
    return raise_in(place.path, place.function, raised, place.node.lineno, prefix)


def bare(release: str, file: str, function: str, source: str, prefix: str = CORE, root: Path | None = None) -> str:
    """The traceback of an assertion without a text: `source` is what it asserts, in this function."""
    for path in files(release)[file] if root is None else [root / file]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assert) and ast.unparse(inner) == source:
                        return raise_in(path, function, ast.Assert(ast.Constant(False), None), inner.lineno, prefix)
    raise AssertionError(f"{release} has no `{source}` in {function} of {file}")


def raise_in(path: Path, function: str, statement: ast.stmt, lineno: int, prefix: str = CORE) -> str:
    code = ast.parse(f"def {function}(): pass\n{function}()")
    code.body[0].body = [statement]  # type: ignore[attr-defined]
    _at(code, lineno)
    try:
        exec(compile(code, str(path), "exec"), {})
    except Exception:  # noqa: BLE001
        text = traceback.format_exc()
    own, _, rest = text.partition("\n")
    frames = rest[rest.index(f'  File "{path}"') :]
    lines = ["EngineCore encountered a fatal error.", own, *frames.replace(str(ROOT), "/opt/app").splitlines()]
    return "".join(f"{prefix}{each}\n" for each in lines)
