import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT, Fresh

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


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in FILES else node.module


#: {module of kvfix: the modules of kvfix that the module imports}. Imports under `if TYPE_CHECKING` do not count.
NEEDS = {
    name: FILES.keys() & set(imported(WithoutTypes().visit(ast.parse(path.read_text()))))
    for name, path in FILES.items()
}


def test_there_is_no_cycle() -> None:
    order = list(TopologicalSorter(NEEDS).static_order())
    assert order.index("kvfix.session") < order.index("kvfix.applying") < order.index("kvfix")


def test_pure_modules_do_not_import_the_session() -> None:
    def all_of(name: str) -> set[str]:
        return NEEDS[name].union(*map(all_of, NEEDS[name]))

    pure = [name for name in FILES if name.startswith("kvfix.ledger")]
    for name in (*pure, "kvfix.applicability", "kvfix.installed_source", "kvfix.fixes.record", "kvfix.redact"):
        assert "kvfix.session" not in all_of(name), name


@pytest.mark.parametrize(
    ("folder", "never"),
    [("patches/kvfix", {"kvfix_tools", "maintain", "tests"}), ("tools/kvfix_tools", {"maintain", "tests", "mkdocs"})],
)
def test_no_package_needs_what_is_not_installed_with_it(folder: str, never: set[str]) -> None:
    trees = (ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    packages = {name.partition(".")[0] for tree in trees for name in imported(tree)}
    assert "kvfix" in packages
    assert not packages & never


WATCHES = """
from kvfix.config import Config
from kvfix import connector_events
from kvfix.session import session
session.config = Config.parse({!r})
assert connector_events._begin(type("Connector", (), {{"role": None}})(), False) is not None
"""


@pytest.mark.parametrize(
    ("code", "modules", "imported"),
    [
        ("import kvfix; kvfix.apply()", "torch vllm lmcache typer rich wrapt packaging asyncio importlib.metadata", ""),
        ("import kvfix.ledger", "torch vllm lmcache msgspec rich", ""),
        ("from kvfix import metrics; metrics.violated('KVR002'); metrics.settled()", "prometheus_client", ""),
        (WATCHES.format("check"), "kvfix.connector_events.audit", ""),
        (WATCHES.format("check audit=0.001"), "kvfix.connector_events.audit", "kvfix.connector_events.audit"),
    ],
    ids=["apply", "ledger", "metrics", "check", "audit"],
)
def test_what_is_imported(code: str, modules: str, imported: str, fresh: Fresh) -> None:
    found = fresh(f"{code}\nimport sys; result = sorted(sys.modules)")
    assert set(modules.split()) & set(found) == set(imported.split())
