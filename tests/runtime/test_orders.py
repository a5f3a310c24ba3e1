"""Import, apply and revert in different orders. The imported hook is fixed if `apply` ran after the last `revert`."""

import functools
import importlib
import sys
from itertools import permutations
from typing import Any

import pytest

import kvfix
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
from tests.conftest import ADAPTER, answers, release

HOOK = "get_num_new_matched_tokens"
STEPS = {"import": lambda: importlib.import_module(ADAPTER), "apply": kvfix.apply, "revert": kvfix.revert}
ORDERS = [
    *sorted(set(permutations(["import", "apply", "apply", "revert"]))),
    ("apply", "import", "revert", "revert"),
    ("apply", "import", "revert", "apply"),
    ("import", "revert", "apply", "revert"),
    ("apply", "revert", "import", "apply"),
]


def status() -> str:
    return next(row.verdict for row in kvfix.status() if row.code == "KVF001")


def expected(steps: tuple[str, ...]) -> list[str | None]:
    found: list[str | None] = []
    imported = applied = False
    for step in steps:
        imported |= step == "import"
        applied = step == "apply" or (applied and step != "revert")
        found.append(("right" if applied else "wrong") if imported else None)
    return found


@pytest.mark.parametrize(("steps", "answer"), [(each, expected(each)) for each in ORDERS], ids=map("-".join, ORDERS))
@answers(also="answer", release="0.3.10")
def test_order(steps: tuple[str, ...]) -> list[str | None]:
    originals, result = [], []
    for step in steps:
        STEPS[step]()
        adapter = sys.modules.get(ADAPTER)
        if adapter is None:
            result.append(None)
            continue
        function = vars(adapter.LMCacheConnectorV1Impl)[HOOK]
        wrong = shows_bug(function, adapter)
        if wrong:
            originals.append(function)
        result.append("wrong" if wrong else "right")
    assert len(set(map(id, originals))) <= 1, "revert left another function than the original"
    return result


@pytest.mark.parametrize("kvfix_first", [True, False], ids=["kvfix first", "the other first"])
@answers([False, True, False, 3, "applied"], release="0.3.10")
def test_another_tool_wraps_the_same_hook(kvfix_first: bool) -> list[Any]:
    """kvfix adds and removes its own wrapper, inside or outside of `theirs`. Each call of the hook runs `theirs`."""
    if kvfix_first:
        kvfix.apply()
    adapter = importlib.import_module(ADAPTER)
    cls = adapter.LMCacheConnectorV1Impl
    calls = []
    inner = vars(cls)[HOOK]

    @functools.wraps(inner)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    cls.get_num_new_matched_tokens = theirs
    result = []
    for step in (kvfix.apply, kvfix.revert, kvfix.apply):
        step()
        result.append(shows_bug(lambda *arguments: cls.get_num_new_matched_tokens(*arguments), adapter))
    return [*result, len(calls), status()]


@pytest.mark.parametrize(
    ("promised", "answer"), [(256, "applied"), (0, "fixed-upstream"), (17, "refused"), (None, "refused")]
)
@answers(also="answer", release="0.3.10")
def test_the_probe_decides_on_a_replaced_hook(promised: int | None) -> str:
    """promised: the hook's answer. With None, the hook raises AttributeError."""

    def theirs(self: Any, request: Any, num_computed_tokens: int) -> Any:
        return self.odd if promised is None else promised

    importlib.import_module(ADAPTER).LMCacheConnectorV1Impl.get_num_new_matched_tokens = theirs
    kvfix.apply()
    (row,) = (row for row in kvfix.status() if row.code == "KVF001")
    assert "was replaced by" in row.reason
    return row.verdict


def applied_in_between(early: bool) -> list[str]:
    """Import a module that calls `kvfix.apply()`. Return the status before and after one more `kvfix.apply()`."""
    if early:
        kvfix.apply()
    importlib.import_module(ADAPTER)
    half = status()
    kvfix.apply()
    return [half, status()]


@pytest.mark.parametrize(
    ("early", "statuses"), [(False, ["refused", "applied"]), (True, ["applied", "applied"])], ids=["late", "early"]
)
def test_applied_while_the_module_is_half_imported(early, statuses, tmp_path, fork_server) -> None:  # type: ignore[no-untyped-def]
    from tests.runtime.test_releases import copy

    def edit(text: str) -> str:
        head, mark, tail = text.partition("\nclass LMCacheConnectorV1Impl")
        return f"{head}\nimport kvfix\nkvfix.apply()\n{mark}{tail}"

    assert fork_server(applied_in_between, copy(release("0.3.10"), tmp_path, edit), early) == statuses


@answers([False, "applied"] * 4 + [True], release="0.3.10")
def test_a_reloaded_module_is_fixed_again() -> list[Any]:
    def wrong() -> bool:
        return shows_bug(vars(sys.modules[ADAPTER].LMCacheConnectorV1Impl)[HOOK], sys.modules[ADAPTER])

    kvfix.apply(only=["KVF001"])
    result: list[Any] = []
    for change in ("import", "reload", "import", "reload"):
        if change == "reload":
            importlib.reload(sys.modules[ADAPTER])
        else:
            sys.modules.pop(ADAPTER, None)
            importlib.import_module(ADAPTER)
        result += [wrong(), status()]
    kvfix.revert()
    return [*result, wrong()]
