"""Read the versions, modules and source code of installed packages from files, without importing the packages."""

import ast
import re
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvfix import installed_source


@cache
def parse(file: Path) -> ast.Module | None:
    """Return the file as a syntax tree, or None if the file is not readable Python."""
    with suppress(OSError, SyntaxError, ValueError):
        return ast.parse(file.read_text(encoding="utf-8"))
    return None


class Package(NamedTuple):
    """A package. name: its top-level module. version: "" without metadata. needs: its Requires-Dist lines."""

    name: str
    folder: Path
    version: str
    needs: tuple[str, ...]

    @property
    def title(self) -> str:
        shown = {"vllm": "vLLM", "lmcache": "LMCache"}.get(self.name, self.name)
        return f"{shown} {self.version or 'of an unknown release'}"

    def file(self, module: str) -> Path | None:
        """Return the file of `package.module`, or None if the file does not exist."""
        path = self.folder.parent.joinpath(*module.split("."))
        return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)

    def has(self, module: str) -> bool:
        """Return True if the module exists as Python, as a compiled file, or as a folder without `__init__.py`."""
        path = self.folder.parent.joinpath(*module.split("."))
        return self.file(module) is not None or path.is_dir() or any(path.parent.glob(f"{path.name}.*so"))

    def tree(self, module: str) -> ast.Module | None:
        file = self.file(module)
        return parse(file) if file else None

    def found(self, folder: str, pattern: str) -> set[str]:
        """Return the matches of a pattern in the source files of a folder of the package."""
        texts = (file.read_text(encoding="utf-8", errors="replace") for file in (self.folder / folder).glob("*.py"))
        return {each for text in texts for each in re.findall(pattern, text)}


class Packages:
    """Find packages. places: folders to search, such as site-packages, or None for the folders of this Python."""

    def __init__(self, places: list[str] | None = None) -> None:
        self.places = places
        self._found: dict[str, Package | None] = {}

    def get(self, name: str) -> Package | None:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def tree(self, module: str) -> ast.Module | None:
        package = self.get(module.partition(".")[0])
        return package.tree(module) if package else None

    def text(self, module: str) -> str:
        """Return the source of a module, or "" if the module is not installed."""
        package = self.get(module.partition(".")[0])
        file = package.file(module) if package else None
        return file.read_text(encoding="utf-8", errors="replace") if file else ""

    def _find(self, name: str) -> Package | None:
        if self.places is None:
            folder = installed_source.package_dir(name)
        else:
            folder = next((Path(place, name) for place in self.places if Path(place, name).is_dir()), None)
        if folder is None:
            return None
        for dist in installed_source.PROVIDERS.get(name, (name,)):
            for path in [[str(folder.parent)], self.places]:
                for found in metadata.distributions(name=dist, path=sys.path if path is None else path):
                    return Package(name, folder, str(found.version), tuple(found.requires or ()))
        return Package(name, folder, "", ())


def constant(node: ast.expr | None) -> Any:
    """Return the value of a literal, or None for any other expression."""
    with suppress(ValueError, TypeError, SyntaxError, MemoryError):
        return ast.literal_eval(node) if node is not None else None
    return None


def assigned(tree: ast.AST | None, name: str) -> ast.expr | None:
    """Return the expression that a module or class assigns to a name at its top level, or None."""
    for node in getattr(tree, "body", ()):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in [getattr(each, "id", "") for each in targets]:
            return node.value
    return None


def defined(tree: ast.AST | None, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the last class or function with this name in a module or class, or None."""
    nodes = (node for node in getattr(tree, "body", ()) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {node.name: node for node in nodes}.get(name)


def compared(function: ast.AST | None) -> list[ast.Compare]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Compare)] if function else []
