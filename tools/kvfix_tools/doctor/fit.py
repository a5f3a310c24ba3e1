"""Check that two packages work together: find missing imports, and arguments that a function does not accept."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from kvfix_tools.doctor.packages import Package, defined


class Misfit(NamedTuple):
    """A failing import or a wrong call. where: file and line below site-packages. what: Python's error message."""

    where: str
    what: str


class _Import(NamedTuple):
    module: str
    name: str  # "" for `import module`
    bound: str
    line: int


def misfits(start: tuple[Package, str], other: Package) -> list[Misfit]:
    """Find where a package imports or calls `other` in a way that fails. start: (package, module at which to begin)."""
    package, first = start
    found, seen, waiting = list[Misfit](), set[str](), [first]
    while waiting:
        module = waiting.pop()
        tree = package.tree(module) if module not in seen else None
        seen.add(module)
        if tree is None:
            continue
        file = "/".join(module.split("."))
        names: dict[str, tuple[str, str]] = {}
        for each in _imports(tree.body, package, other, module == first):
            if _is_of(each, package):
                parts = each.module.split(".")
                waiting += [each.module, *([f"{each.module}.{each.name}"] if each.name else [])]
                waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
            elif _is_of(each, other):
                if lacks := _lacks(each, other):
                    found.append(Misfit(f"{file}.py:{each.line}", lacks))
                elif each.name:
                    names[each.bound] = each.module, each.name
        found += [Misfit(f"{file}.py:{line}", what) for line, what in _calls(tree, names, other)]
    return found


def _imports(body: list[ast.stmt], package: Package, other: Package, inside: bool) -> Iterator[_Import]:
    """Yield the imports that Python executes in these statements.

    If an import in a `try` block fails and the `except` block does not raise, yield only the `except` block's imports.
    inside: True to also yield imports in `__init__` methods and `if` statements.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (_Import(each.name, "", each.asname or each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                if each.name != "*":
                    yield _Import(node.module, each.name, each.asname or each.name, node.lineno)
        elif isinstance(node, ast.Try):
            yield from _of_try(node, package, other, inside)
        elif isinstance(node, ast.ClassDef | ast.With) or (
            inside and isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ):
            yield from _imports(node.body, package, other, inside)
        elif isinstance(node, ast.If) and inside and "TYPE_CHECKING" not in ast.unparse(node.test):
            # kvfix cannot tell which branch Python takes, so kvfix leaves out imports that fail.
            both = [*_imports(node.body, package, other, inside), *_imports(node.orelse, package, other, inside)]
            yield from (each for each in both if not _is_of(each, other) or not _lacks(each, other))


def _of_try(node: ast.Try, package: Package, other: Package, inside: bool) -> Iterator[_Import]:
    tried = list(_imports(node.body, package, other, inside))
    caught = next((each.body for each in node.handlers if _catches(each)), None)
    fails = any(_lacks(each, other) for each in tried if _is_of(each, other))
    if fails and caught and not any(isinstance(each, ast.Raise) for each in caught):
        yield from _imports(caught, package, other, inside)
    else:
        yield from tried
    yield from _imports(node.orelse, package, other, inside)


def _is_of(each: _Import, package: Package) -> bool:
    return each.module.partition(".")[0] == package.name


def _catches(handler: ast.ExceptHandler) -> bool:
    types = ast.unparse(handler.type) if handler.type is not None else "BaseException"
    return re.search(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b", types) is not None


def _lacks(each: _Import, package: Package) -> str:
    """Return Python's error message; "" if the import succeeds or kvfix cannot decide."""
    if not package.has(each.module):
        return f"No module named '{each.module}'"
    if not each.name or package.has(f"{each.module}.{each.name}"):
        return ""
    tree = package.tree(each.module)
    if tree is None or not _names(tree).isdisjoint((each.name, "*")):
        return ""
    return f"cannot import name '{each.name}' from '{each.module}'"


@cache
def _names(tree: ast.Module) -> frozenset[str]:
    """Return the names that the module may provide; "*" stands for any name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add("*" if node.name == "__getattr__" and node in tree.body else node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(each.asname or each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
            names.add("*")
    return frozenset(names)


def _calls(tree: ast.Module, names: dict[str, tuple[str, str]], other: Package) -> Iterator[tuple[int, str]]:
    """Yield (line, Python's error message) for each call whose arguments a function of `other` does not accept."""
    signatures = {bound: _signature(other, *where) for bound, where in names.items()}
    for node in ast.walk(tree) if signatures else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        signature = signatures.get(node.func.id)
        if signature is None or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        keywords = {each.arg: each.value for each in node.keywords if each.arg is not None}
        if len(keywords) == len(node.keywords):  # the call has no `**`
            try:
                signature.bind(*node.args, **keywords)
            except TypeError as error:
                yield node.lineno, f"{names[node.func.id][1]}() {error}"


def _signature(package: Package, module: str, name: str) -> Signature | None:
    """Return the signature of a function, of a class with its own `__init__`, or of a plain dataclass; else None."""
    node, skip = defined(package.tree(module), name), 0
    if isinstance(node, ast.ClassDef):
        is_dataclass = any(ast.unparse(each) in ("dataclass", "dataclasses.dataclass") for each in node.decorator_list)
        if is_dataclass and not node.bases and defined(node, "__init__") is None:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            if any("field(" in ast.unparse(each) or "ClassVar" in ast.unparse(each.annotation) for each in fields):
                return None
            return Signature([_parameter(ast.unparse(each.target), each.value is not None) for each in fields])
        node, skip = (None if node.keywords else defined(node, "__init__")), 1
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    given = node.args
    if given.vararg or given.kwarg or given.posonlyargs:
        return None
    first_default = len(given.args) - len(given.defaults)
    parameters = [_parameter(each.arg, at >= first_default) for at, each in enumerate(given.args)][skip:]
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(_parameter(each.arg, default is not None, Parameter.KEYWORD_ONLY))
    return Signature(parameters)


def _parameter(name: str, has_default: bool, kind: Any = Parameter.POSITIONAL_OR_KEYWORD) -> Parameter:
    return Parameter(name, kind, default=None if has_default else Parameter.empty)
