"""Register the checks of `kvfix doctor`. Each check is a small function with the decorator `check`:

    @check("chunk-size", essential=True)
    def chunk_size(setup): ...

A check yields lines `ok`, `problem` or `unchecked`, or no line if the check does not apply. The function's docstring
becomes the check's row in the documentation. If no essential check can run, the exit code of kvfix doctor is 77.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import NamedTuple

from kvfix_tools import redact
from kvfix_tools.diagnose import problems as known_problems
from kvfix_tools.doctor.setup import Setup

#: The modules with checks, in the order of the report. A module comes after the modules that its checks depend on.
_MODULES = (
    "installation", "transfer", "settings", "cache", "model", "addresses", "disaggregated", "memory", "kvfix", "storage"
)  # fmt: skip
_CHECKS: list["Check"] = []
OK, PROBLEM, UNCHECKED = "ok", "problem", "unchecked"


class Line(NamedTuple):
    """A result of a check. what: the result in one sentence. do: the remedy that the user can type, or ""."""

    check: str
    status: str
    what: str
    do: str = ""


ok, problem, unchecked = (partial(Line, "", status) for status in (OK, PROBLEM, UNCHECKED))
Look = Callable[[Setup], Iterator[Line]]


class Check(NamedTuple):
    name: str
    essential: bool
    look: Look

    @property
    def doc(self) -> str:
        return " ".join((self.look.__doc__ or "").split())


def check(name: str, essential: bool = False) -> Callable[[Look], Look]:
    def register(look: Look) -> Look:
        _CHECKS.append(Check(name, essential, look))
        return look

    return register


def remedy(code: str) -> str:
    """Return the remedy that kvfix-diagnose prints for the problem with this code."""
    return next(f"{each.do}; kvfix explain {code}" for each in known_problems.catalogue() if each.code == code)


@lru_cache(maxsize=1)
def catalogue() -> tuple[Check, ...]:
    for name in _MODULES:
        import_module(f"{__name__}.{name}")
    return tuple(_CHECKS)


def lines(setup: Setup) -> Iterator[Line]:
    """Yield the lines of every check, without secrets. If a check raises an error, yield a line about the error."""
    for each in catalogue():
        try:
            found = list(each.look(setup))
        except Exception as error:  # noqa: BLE001
            found = [unchecked(f"this check failed: {type(error).__name__}: {error}", "report this error to kvfix")]
        for line in found:
            yield line._replace(check=each.name, what=redact.text(line.what), do=redact.text(line.do))
