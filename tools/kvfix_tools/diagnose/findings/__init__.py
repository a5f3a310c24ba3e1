"""What is wrong, one function each. A function is a finding by its decorator; nothing lists them.

    @finding("KVD101", "cached-hit-promised-whole", Severity.CRASH, on=["raised"], fixes=["KVF001"])
    def cached_hit_promised_whole(case, seen): ...

`on`: kinds of lines (grammar) at which it is asked; "" is the end of the log. It answers None, or an `Answer` with the
sentence that tells the numbers of this case. Its docstring: a title, then paragraphs `Cause:` (left out where the fix
tells it), `Setting:` (what avoids it), `Normal:` (what looks like it and is not). What a fix knows (cause, releases) is
taken from the catalogue of kvfix.fixes, not told again.
"""

from __future__ import annotations

import enum
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Optional

from kvfix.cures import candidates
from kvfix.ledger import RULES
from kvfix.ledger import Finding as Verdict


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
        return _WORDS[self]


_WORDS = {
    Severity.CRASH: "crash",
    Severity.WRONG: "wrong KV",
    Severity.HANG: "hang",
    Severity.LEAK: "leak",
    Severity.SLOW: "slow",
    Severity.RISK: "risk",
}


class Answer(NamedTuple):
    """sentence: this case in numbers. request: None: the line's own; "": of no one request. evidence: more lines."""

    sentence: str
    request: str | None = None
    verdict: str = "violated"
    evidence: tuple[Any, ...] = ()


class Rule(NamedTuple):
    code: str
    name: str
    severity: Severity
    on: tuple[str, ...]
    fixes: tuple[str, ...]
    look: Callable[[Any, Any], Optional[Answer]]  # noqa: UP045
    doc: str

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


_FOUND: list[Rule] = []
_NOTES: dict[str, list[Callable[[Any, Any], None]]] = {}

#: (rule of the ledger, the line that it needs, what that line tells): what a log without DEBUG lines cannot show.
HIDDEN = (
    ("KVR004", "due", "what was granted, and what is loaded"),
    ("KVR007", "storing", "which tokens are stored, and what is left out"),
)


def finding(
    code: str, name: str, severity: Severity, on: list[str], fixes: list[str] | None = None
) -> Callable[[Callable[..., Answer | None]], Callable[..., Answer | None]]:
    def register(look: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        _FOUND.append(Rule(code, name, severity, tuple(on), tuple(fixes or ()), look, look.__doc__ or ""))
        return look

    return register


def note(on: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """A function that remembers something of this kind of line in `case.memory`, for findings to look at."""

    def register(keep: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _NOTES.setdefault(on, []).append(keep)
        return keep

    return register


def notes() -> dict[str, list[Callable[[Any, Any], None]]]:
    """{kind of line: what is called before the findings}"""
    catalogue()
    return _NOTES


@lru_cache(maxsize=1)
def catalogue() -> tuple[Rule, ...]:
    """Every finding, in the order of its code."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(sorted(_FOUND, key=lambda rule: rule.code))


def find(name: str) -> Rule | None:
    """The finding of this code or name; None if there is none."""
    return next((rule for rule in catalogue() if name.upper() == rule.code or name.lower() == rule.name), None)


@lru_cache(maxsize=1)
def rules() -> dict[str, tuple[Rule, ...]]:
    """{kind of line: the findings that look at it}"""
    by_name: dict[str, tuple[Rule, ...]] = {}
    for rule in catalogue():
        for name in rule.on:
            by_name[name] = (*by_name.get(name, ()), rule)
    return by_name


def ledger_rule(verdict: Verdict) -> Rule:
    """A rule of the ledger as a finding: what no finding of the log explains. Its fixes are those that cure it."""
    known = next(rule for rule in RULES if rule.code == verdict.code)
    doc = f"{known.name.replace('-', ' ').capitalize()}.\n\nCause: {known.doc}"
    return Rule(known.code, known.name, Severity.WRONG, (), tuple(candidates(verdict)), lambda case, seen: None, doc)
