"""Every order of import of LMCache, apply, second apply and revert, each in its own process.

After every step the installed function is right exactly if the module is imported and the last call was apply. After a
revert the class has its original function object.
"""

from itertools import permutations

import pytest

from tests.conftest import ADAPTER, ForkServer

STEPS = {
    "import": f"import {ADAPTER} as adapter",
    "apply": "kvfix.apply()",
    "revert": "kvfix.revert()",
}
ORDERS = [
    *sorted(set(permutations(["import", "apply", "apply", "revert"]))),
    ("apply", "import", "revert", "revert"),
    ("apply", "import", "revert", "apply"),
    ("import", "revert", "apply", "revert"),
    ("apply", "revert", "import", "apply"),
]

CASE = """
import sys, kvfix
from types import SimpleNamespace
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
name = "get_num_new_matched_tokens"
adapter = sys.modules.get({adapter!r})
originals, result = [], []
for step in {steps!r}:
    exec({sources!r}[step])
    if adapter is None:
        result.append(None)
        continue
    function = vars(adapter.LMCacheConnectorV1Impl)[name]
    adapter.logger.disabled = True
    if shows_bug(function, adapter):
        originals.append(function)
    result.append("wrong" if shows_bug(function, adapter) else "right")
assert len(set(map(id, originals))) <= 1, "revert left another function than the original"
"""


@pytest.mark.parametrize("steps", ORDERS, ids="-".join)
def test_order(steps: tuple[str, ...], fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    expected: list[str | None] = []
    imported = applied = False
    for step in steps:
        imported |= step == "import"
        applied = step == "apply" or (applied and step != "revert")
        expected.append(("right" if applied else "wrong") if imported else None)
    case = CASE.format(adapter=ADAPTER, steps=steps, sources=STEPS)
    assert fork_server(case, release("0.3.10")) == expected


def test_the_orders_are_complete() -> None:
    assert set(permutations(["import", "apply", "apply", "revert"])) <= set(ORDERS)
    assert len(ORDERS) == 16


PATCHED_BY_ANOTHER = f"""
import kvfix, functools
kvfix.apply() if {{before!r}} else None
import {ADAPTER} as adapter
adapter.logger.disabled = True
cls = adapter.LMCacheConnectorV1Impl
calls = []
inner = vars(cls)["get_num_new_matched_tokens"]
@functools.wraps(inner)
def theirs(*args, **kwargs):
    calls.append(1)
    return inner(*args, **kwargs)
cls.get_num_new_matched_tokens = theirs
kvfix.apply()
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
function = lambda *a: cls.get_num_new_matched_tokens(*a)
result = [shows_bug(function, adapter)]
kvfix.revert()
result.append(shows_bug(function, adapter))
kvfix.apply()
result.append(shows_bug(function, adapter))
result.append(len(calls))
result.append([row.verdict for row in kvfix.status()][0])
"""


@pytest.mark.parametrize("before", [True, False], ids=["kvfix first", "the other first"])
def test_another_tool_wraps_the_same_hook(before: bool, fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    """The other tool's wrapper is called in every state. Ours is added and removed inside or outside of it."""
    case = PATCHED_BY_ANOTHER.replace("{before!r}", repr(before))
    assert fork_server(case, release("0.3.10")) == [False, True, False, 3, "applied"]


REPLACED = f"""
import {ADAPTER} as adapter
def theirs(self, request, num_computed_tokens):
    return {{answer}}
adapter.LMCacheConnectorV1Impl.get_num_new_matched_tokens = theirs
import kvfix
kvfix.apply()
row = [row for row in kvfix.status() if row.code == "KVF001"][0]
result = [row.verdict, row.reason]
"""


@pytest.mark.parametrize(
    ("answer", "status"), [("256", "applied"), ("0", "fixed-upstream"), ("17", "unknown"), ("self.odd", "unknown")]
)
def test_the_probe_decides_on_a_replaced_hook(answer: str, status: str, fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    found, reason = fork_server(REPLACED.replace("{answer}", answer), release("0.3.10"))
    assert found == status
    assert "was replaced by" in reason


HALF = """
import sys, kvfix
from pathlib import Path
{first}
import {adapter} as adapter
rows = {{row.code: row for row in kvfix.status()}}
result = [rows["KVF001"].verdict]
kvfix.apply()
result.append({{row.code: row for row in kvfix.status()}}["KVF001"].verdict)
"""


@pytest.mark.parametrize(
    ("first", "statuses"),
    [("", ["failed", "applied"]), ("kvfix.apply()", ["applied", "applied"])],
    ids=["late", "early"],
)
def test_applied_while_the_module_is_half_imported(first, statuses, tmp_path, fork_server, release) -> None:  # type: ignore[no-untyped-def]
    from tests.runtime.test_releases import copy

    def edit(text: str) -> str:
        head, mark, tail = text.partition("\nclass LMCacheConnectorV1Impl")
        return f"{head}\nimport kvfix\nkvfix.apply()\n{mark}{tail}"

    folder = copy(release("0.3.10"), tmp_path, edit)
    assert fork_server(HALF.format(first=first, adapter=ADAPTER), folder) == statuses


RELOADED = f"""
import importlib, kvfix, sys
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
kvfix.apply(only=["KVF001"])
import {ADAPTER} as adapter
adapter.logger.disabled = True
result = []
for reload in (lambda: None, lambda: importlib.reload(adapter), again, lambda: importlib.reload(adapter)):
    reload()
    adapter = sys.modules[{ADAPTER!r}]
    adapter.logger.disabled = True
    result.append(shows_bug(vars(adapter.LMCacheConnectorV1Impl)["get_num_new_matched_tokens"], adapter))
    result.append([row.verdict for row in kvfix.status()][0])
kvfix.revert()
result.append(shows_bug(vars(adapter.LMCacheConnectorV1Impl)["get_num_new_matched_tokens"], adapter))
"""
AGAIN = f"""import sys
def again():
    del sys.modules[{ADAPTER!r}]
    import {ADAPTER}
"""


def test_a_reloaded_module_is_fixed_again(fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    """By importlib.reload, and by a new import after its removal from sys.modules."""
    assert fork_server(AGAIN.lstrip() + RELOADED, release("0.3.10")) == [False, "applied"] * 4 + [True]
