"""What is wrong, one function each. A function is a finding by its decorator; nothing lists them.

    @finding("KVD101", "cached-hit-promised-whole", Severity.CRASH, on=["raised"])
    def cached_hit_promised_whole(log, line): ...

`on`: kinds of lines (grammar) at which it is asked; "" is the end of the log. It answers None, or an `Answer` with the
sentence with the numbers of this case. Its docstring: a title, then paragraphs `Cause:` (left out where the fix has
it), `Setting:` (what avoids it), `First:` (before a fix), `Good:` (what ends it, if not a release of the fix),
`Normal:` (what looks like it and is not). What a fix knows (cause, releases) is taken from the catalogue of
kvfix.fixes, not written again.
"""

from __future__ import annotations

import enum
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from kvfix import catalogue as known_fixes
from kvfix.ledger import RULES, Finding


class Severity(enum.Enum):
    """The worst first."""

    CRASH = 0
    WRONG = 1
    HANG = 2
    LEAK = 3
    SLOW = 4
    RISK = 5

    @property
    def word(self) -> str:
        return "wrong KV" if self is Severity.WRONG else self.name.lower()


class Answer(NamedTuple):
    """sentence: this case in numbers. request: None: the line's own; "": of no one request. evidence: more lines.
    record: the finding is this record of a problem, not the one whose function answers."""

    sentence: str
    request: str | None = None
    verdict: str = "violated"
    evidence: tuple[Any, ...] = ()
    record: Any = None


class LogRule(msgspec.Struct, frozen=True):
    code: str
    name: str
    severity: Severity
    on: tuple[str, ...]
    look: Callable[[Any, Any], Answer | None]
    doc: str
    #: Of a rule of the ledger: the violation, by which its fixes are found.
    message: str | None = None

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of the fixes of which this is evidence."""
        return tuple(fix.code for fix in known_fixes.handling(self.code, self.message))

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0]

    def section(self, name: str) -> str:
        """The paragraph that begins with `name:`; "" if there is none."""
        for paragraph in self.doc.split("\n\n"):
            if paragraph.strip().startswith(f"{name}:"):
                text = " ".join(paragraph.strip().removeprefix(f"{name}:").split())
                return text[:1].upper() + text[1:]
        return ""


_RULES: list[LogRule] = []
_NOTES: dict[str, list[Callable[[Any, Any], None]]] = {}

#: (rule of the ledger, the line that it needs, what that line shows): what a log without DEBUG lines cannot show.
HIDDEN = (
    ("KVR004", "due", "what was granted, and what is loaded"),
    ("KVR007", "storing", "which tokens are stored, and what is left out"),
)


def finding(
    code: str, name: str, severity: Severity, on: list[str]
) -> Callable[[Callable[..., Answer | None]], Callable[..., Answer | None]]:
    def register(look: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        _RULES.append(LogRule(code, name, severity, tuple(on), look, look.__doc__ or ""))
        return look

    return register


def note(on: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """A function that remembers something of this kind of line in `log.memory`, for findings to look at."""

    def register(keep: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _NOTES.setdefault(on, []).append(keep)
        return keep

    return register


def notes() -> dict[str, list[Callable[[Any, Any], None]]]:
    """{kind of line: what is called before the findings}"""
    catalogue()
    return _NOTES


@lru_cache(maxsize=1)
def catalogue() -> tuple[LogRule, ...]:
    """Every finding, in the order of its code."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(sorted(_RULES, key=lambda rule: rule.code))


def find(name: str) -> LogRule | None:
    """The finding of this code or name; None if there is none."""
    return next((rule for rule in catalogue() if name.upper() == rule.code or name.lower() == rule.name), None)


@lru_cache(maxsize=1)
def rules() -> dict[str, tuple[LogRule, ...]]:
    """{kind of line: the findings that look at it}"""
    by_name: dict[str, tuple[LogRule, ...]] = {}
    for rule in catalogue():
        for name in rule.on:
            by_name[name] = (*by_name.get(name, ()), rule)
    return by_name


def ledger_rule(violated: Finding) -> LogRule:
    """A rule of the ledger as a finding: what no finding of the log explains. Its fixes are those that handle it."""
    known = next(rule for rule in RULES if rule.code == violated.code)
    doc = f"{known.name.replace('-', ' ').capitalize()}.\n\nCause: {known.doc}"
    return LogRule(known.code, known.name, Severity.WRONG, (), lambda log, line: None, doc, message=violated.message)
