"""Imports in the engine package: no cycles, pure modules stay pure. (tests/release checks that it imports no tools.)"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "patches"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (PACKAGE / "kvfix").rglob("*.py")
    if "bootstrap" not in path.parts
}


class WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_types else self.generic_visit(node)


def imported(path: Path) -> Iterator[str]:
    """Modules of kvfix that this file imports, also in functions; without those for type checking only."""
    for node in ast.walk(WithoutTypes().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in FILES else node.module


NEEDS = {name: {each for each in imported(path) if each in FILES} for name, path in FILES.items()}


def test_there_is_no_cycle() -> None:
    """A CycleError has the modules."""
    order = list(TopologicalSorter(NEEDS).static_order())
    assert order.index("kvfix.session") < order.index("kvfix.applying") < order.index("kvfix")


def test_pure_modules_do_not_import_the_session() -> None:
    """Neither directly nor through another module."""

    def all_of(name: str) -> set[str]:
        return NEEDS[name].union(*map(all_of, NEEDS[name]))

    pure = [name for name in FILES if name.startswith("kvfix.ledger")]
    for name in (*pure, "kvfix.applicability", "kvfix.installed_source", "kvfix.fixes.record", "kvfix.redact"):
        assert "kvfix.session" not in all_of(name), name
