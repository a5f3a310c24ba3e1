"""The functions that decide problems by the numbers in lines, one for a record of knowledge/rules.toml.

    @finding
    def cached_hit_promised_whole(log, line): ...

The record `[cached-hit-promised-whole]` has the texts. Its `on` has the kinds of lines and of texts of exceptions
(grammar) for which the function is called. "" is the end of the log. A function returns None, or an `Answer` with a
sentence about this case in numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

#: Modules of this package.
_MODULES = ("crashes", "hangs", "server", "content", "lookups", "statistics", "quiet", "unknown")


class Severity(enum.Enum):
    """Effects, worst first. NOTE is not a finding: the log may only begin or end there."""

    CRASH = 0
    WRONG = 1
    HANG = 2
    LEAK = 3
    SLOW = 4
    RISK = 5
    NOTE = 6

    @property
    def word(self) -> str:
        return "wrong KV" if self is Severity.WRONG else self.name.lower()


class Answer(NamedTuple):
    """sentence: this case in numbers. request: None for the line's request, "" for no request. evidence: more lines.

    note: True if the cause may be that the excerpt begins or ends here.
    """

    sentence: str
    request: str | None = None
    verdict: str = "violated"
    evidence: tuple[Any, ...] = ()
    note: bool = False


Decides = TypeVar("Decides", bound=Callable[..., Answer | None])
Keeps = Callable[[Any, Any], None]

#: {name of the record: the function that decides it}, complete after `functions()`.
FUNCTIONS: dict[str, Callable[..., Answer | None]] = {}
_NOTES: dict[str, list[Keeps]] = {}


def finding(decides: Decides) -> Decides:
    """Register the function that decides the record of its name."""
    FUNCTIONS[decides.__name__.replace("_", "-")] = decides
    return decides


def note(on: str) -> Callable[[Keeps], Keeps]:
    """Register a function that keeps something of this kind of line (`log.state`) for other functions to read."""

    def register(keep: Keeps) -> Keeps:
        _NOTES.setdefault(on, []).append(keep)
        return keep

    return register


@lru_cache(maxsize=1)
def functions() -> dict[str, Callable[..., Answer | None]]:
    """Return FUNCTIONS."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return FUNCTIONS


def notes() -> dict[str, list[Keeps]]:
    """Return {kind of line: functions that are called before others decide}."""
    functions()
    return _NOTES
