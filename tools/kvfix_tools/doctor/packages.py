"""What is installed, read from its files: versions, modules, the names in them, and the arguments they take.

Nothing is imported, so a package that cannot be imported here is read like any other.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from kvfix import installed_source


@cache
def parse(file: Path) -> ast.Module | None:
    """The file as a syntax tree; None if it cannot be read as Python."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


class Package(NamedTuple):
    """name: of the top-level package. version: "" without metadata. needs: its Requires-Dist lines."""

    name: str
    folder: Path
    version: str
    needs: tuple[str, ...]

    @property
    def title(self) -> str:
        shown = {"vllm": "vLLM", "lmcache": "LMCache"}.get(self.name, self.name)
        return f"{shown} {self.version or 'of an unknown release'}"

    def file(self, module: str) -> Path | None:
        """Of `package.module`; None if there is none."""
        path = self.folder.parent.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def has(self, module: str) -> bool:
        """Whether there is such a module, as Python, compiled, or a folder without `__init__.py`."""
        path = self.folder.parent.joinpath(*module.split("."))
        return self.file(module) is not None or path.is_dir() or any(path.parent.glob(f"{path.name}.*so"))

    def tree(self, module: str) -> ast.Module | None:
        file = self.file(module)
        return parse(file) if file else None

    def text(self, module: str) -> str:
        """Source of the module; "" if there is none."""
        file = self.file(module)
        return file.read_text(encoding="utf-8", errors="replace") if file else ""


class Packages:
    """Those of this Python, or of some folders like its site-packages. places: the folders; None: this Python's own."""

    def __init__(self, places: list[str] | None = None) -> None:
        self.places = places
        self._found: dict[str, Package | None] = {}

    def get(self, name: str) -> Package | None:
        """An installed top-level package; None if it is not installed."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

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


def constant(node: ast.expr | None) -> object:
    """The value of a literal; None if it is none."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return None


def assigned(tree: ast.AST, name: str) -> ast.expr | None:
    """What a name is set to at the top of a module or class."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == name for each in node.targets
        ):
            return node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node.value
    return None


def defined(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """The last class or function of this name in a module or class."""
    found = None
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            found = node
    return found
