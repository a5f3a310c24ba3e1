"""Functions that decide, from the numbers in log lines, if a log shows a problem of knowledge/rules.toml.

For example, `@finding def waits_for_load(log, line)` decides if the log shows the problem `[waits-for-load]`. The
problem's key `on` lists the kinds of lines and exceptions for which kvfix calls the function. In `on`, "" is the end of
the log. The function returns an `Answer` or None (no problem). A function with `@decides` decides several problems.
"""

import enum
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from kvfix_tools.diagnose.log_line import LogLine


class Severity(enum.Enum):
    """The effects of problems, worst first. A NOTE may be no problem, because the log may be incomplete."""

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
    """A function's decision that the log shows a problem. `sentence` describes the case with numbers.

    request: None means the line's request, and "" means no request. sure: False if another cause is possible.
    evidence: further log lines. note: True if there may be no problem, because the log may be incomplete.
    """

    sentence: str
    request: str | None = None
    sure: bool = True
    evidence: tuple[LogLine, ...] = ()
    note: bool = False


Decides = TypeVar("Decides", bound=Callable[..., Answer | None])
#: Pairs (name of a problem in rules.toml, answer), one for each problem that the line shows.
Answers = Iterator[tuple[str, Answer]]
Keeps = Callable[[Any, Any], None]

#: For each problem, the function that decides the problem. `functions()` completes this dictionary.
FUNCTIONS: dict[str, Callable[..., Answer | None]] = {}
_NOTES: dict[str, list[Keeps]] = {}


def finding(decides: Decides) -> Decides:
    """Register a function for the problem that has the function's name, with "-" for "_"."""
    FUNCTIONS[decides.__name__.replace("_", "-")] = decides
    return decides


def decides(*records: str) -> Callable[[Callable[..., Answers]], Callable[..., Answers]]:
    """Register a function for the problems `records` of rules.toml. The function yields (name of a problem, answer)."""

    def register(answers: Callable[..., Answers]) -> Callable[..., Answers]:
        FUNCTIONS.update({record: partial(_answer_of, record, answers) for record in records})
        return answers

    return register


def _answer_of(record: str, answers: Callable[..., Answers], log: Any, line: Any) -> Answer | None:
    return next((answer for name, answer in answers(log, line) if name == record), None)


def note(*on: str) -> Callable[[Keeps], Keeps]:
    """Register a function that stores facts of lines in `log.state` for other functions. on: kinds of the lines."""

    def register(keep: Keeps) -> Keeps:
        for kind in on:
            _NOTES.setdefault(kind, []).append(keep)
        return keep

    return register


@lru_cache(maxsize=1)
def functions() -> dict[str, Callable[..., Answer | None]]:
    """Return FUNCTIONS. First import all modules of this package, so that FUNCTIONS is complete."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return FUNCTIONS


def notes() -> dict[str, list[Keeps]]:
    """Return {kind of line: functions that `note` registered}. kvfix calls FUNCTIONS after these functions."""
    functions()
    return _NOTES
