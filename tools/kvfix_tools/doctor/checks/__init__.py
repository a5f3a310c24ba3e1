"""The checks. One check is one small function, which its decorator registers:

    @check("chunk-size", essential=True)
    def chunk_size(setup): ...

A check yields lines `ok`, `problem` or `unchecked`, and no line if it does not apply. Its docstring becomes its row in
the documentation. essential: if no essential check can run, the exit code is 77.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from kvfix_tools import redact
from kvfix_tools.diagnose import problems as known_problems
from kvfix_tools.doctor.setup import Setup

OK, PROBLEM, UNCHECKED = "ok", "problem", "unchecked"


class Line(NamedTuple):
    """A result of a check. what: one sentence. do: the remedy as the user types it; "" if there is nothing to do."""

    check: str
    status: str
    what: str
    do: str


class Check(NamedTuple):
    name: str
    essential: bool
    look: Callable[[Setup], Iterator[Line]]

    @property
    def doc(self) -> str:
        return " ".join((self.look.__doc__ or "").split())


_CHECKS: list[Check] = []


def check(
    name: str, essential: bool = False
) -> Callable[[Callable[[Setup], Iterator[Line]]], Callable[[Setup], Iterator[Line]]]:
    def register(look: Callable[[Setup], Iterator[Line]]) -> Callable[[Setup], Iterator[Line]]:
        _CHECKS.append(Check(name, essential, look))
        return look

    return register


def ok(what: str, do: str = "") -> Line:
    return Line("", OK, what, do)


def problem(what: str, do: str) -> Line:
    return Line("", PROBLEM, what, do)


def unchecked(what: str, do: str = "") -> Line:
    return Line("", UNCHECKED, what, do)


def remedy(code: str) -> str:
    """Return what kvfix-diagnose says to do if a log shows the problem with this code."""
    return next(f"{each.now}; kvfix explain {code}" for each in known_problems.catalogue() if each.code == code)


#: The order in the report. Checks on which the others depend come first.
_ORDER = (
    "installation", "releases", "transfer", "settings", "cache", "model", "addresses", "disaggregated", "memory",
    "kvfix",
)  # fmt: skip


@lru_cache(maxsize=1)
def catalogue() -> tuple[Check, ...]:
    """Return every check, in the order of the report."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    for name in sorted(names, key=lambda each: (_ORDER.index(each) if each in _ORDER else len(_ORDER), each)):
        import_module(f"{__name__}.{name}")
    return tuple(_CHECKS)


def lines(setup: Setup) -> Iterator[Line]:
    """Yield the lines of every check, without secrets. If a check raises, report this and run the other checks."""
    for each in catalogue():
        try:
            found = list(each.look(setup))
        except Exception as error:  # noqa: BLE001
            found = [unchecked(f"this check failed: {type(error).__name__}: {error}", "report this error to kvfix")]
        for line in found:
            yield line._replace(check=each.name, what=redact.text(line.what), do=redact.text(line.do))
