"""Functions that decide if a log shows a problem of knowledge/rules.toml, by the numbers in the log's lines.

`@finding def waits_for_load(log, line)` decides the record `[waits-for-load]`, which has the texts. The record's key
`on` names the kinds of lines and exception texts for which kvfix calls the function; "" is the end of the log. A
function returns None, or an `Answer` about this case. `@decides` is for a function that decides several records.
"""

import enum
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from kvfix_tools.diagnose.log_line import LogLine


class Severity(enum.Enum):
    """The effects of problems, worst first. NOTE is no problem: perhaps the log only begins or ends at this line."""

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
    """sentence: describes this case with numbers. request: None means the line's request, "" means no request.

    sure: False if another cause is possible. evidence: more lines. note: True if perhaps the log begins or ends here.
    """

    sentence: str
    request: str | None = None
    sure: bool = True
    evidence: tuple[LogLine, ...] = ()
    note: bool = False


Decides = TypeVar("Decides", bound=Callable[..., Answer | None])
#: Pairs (name of a record that the line shows, answer).
Answers = Iterator[tuple[str, Answer]]
Keeps = Callable[[Any, Any], None]

#: {name of a record: function that decides the record}. `functions()` completes this dictionary.
FUNCTIONS: dict[str, Callable[..., Answer | None]] = {}
_NOTES: dict[str, list[Keeps]] = {}


def finding(decides: Decides) -> Decides:
    """Register a function that decides the record with the function's name."""
    FUNCTIONS[decides.__name__.replace("_", "-")] = decides
    return decides


def decides(*records: str) -> Callable[[Callable[..., Answers]], Callable[..., Answers]]:
    """Register a function that decides these records. The function yields pairs (record, answer)."""

    def register(answers: Callable[..., Answers]) -> Callable[..., Answers]:
        FUNCTIONS.update({record: partial(_answer_of, record, answers) for record in records})
        return answers

    return register


def _answer_of(record: str, answers: Callable[..., Answers], log: Any, line: Any) -> Answer | None:
    return next((answer for name, answer in answers(log, line) if name == record), None)


def note(*on: str) -> Callable[[Keeps], Keeps]:
    """Register a function that keeps facts of these kinds of lines in `log.state`, for other functions."""

    def register(keep: Keeps) -> Keeps:
        for kind in on:
            _NOTES.setdefault(kind, []).append(keep)
        return keep

    return register


@lru_cache(maxsize=1)
def functions() -> dict[str, Callable[..., Answer | None]]:
    """Import all modules of this package, so that FUNCTIONS is complete, and return FUNCTIONS."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return FUNCTIONS


def notes() -> dict[str, list[Keeps]]:
    """Return {kind of line: functions registered by `note`}. kvfix calls them before the functions that decide."""
    functions()
    return _NOTES
