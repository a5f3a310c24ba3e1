"""The rules for logs, one function each.

    @finding("KVD101", "cached-hit-promised-whole", Severity.CRASH, on=["raised"])
    def cached_hit_promised_whole(log, line): ...

`on` lists the kinds of lines and of texts of exceptions (grammar) for which the rule is called. "" is the end of the
log. A rule returns None, or an `Answer` with a sentence about this case in numbers. The docstring of a rule has a
title, then these paragraphs:

- `Cause:` is left out if the fix has the cause.
- `Setting:` avoids the problem.
- `First:` is to be done before a fix is applied.
- `Good:` is the permanent remedy, if it is not a release with the fix.
- `Normal:` looks like the problem but is normal.

kvfix.fixes has the cause and the releases of a fix. Rules do not repeat them.

Rules run in the order of `_MODULES`, and within a module in the order of the file.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import msgspec

from kvfix import catalogue as known_fixes
from kvfix.ledger import Finding
from kvfix_tools.ledger import RULES

#: Modules of this package, in the order in which their rules run.
_MODULES = (
    "crashes", "hangs", "server", "content", "memory", "lookups_seen", "lookups", "statistics", "quiet", "unknown",
)  # fmt: skip


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


class LogRule(msgspec.Struct, frozen=True):
    code: str
    name: str
    severity: Severity
    on: tuple[str, ...]
    look: Callable[[Any, Any], Answer | None]
    doc: str
    #: The violation, if this is a rule of the ledger. Fixes are found by it.
    message: str | None = None
    #: True if the finding is a consequence of other failures, not a cause.
    symptom: bool = False
    # Only records (problems.Problem) can be general, name fixed releases, replace findings or announce a traceback.
    general: ClassVar[bool] = False
    fixed: ClassVar[dict[str, str]] = {}
    announces: ClassVar[bool] = False
    replaces: ClassVar[tuple[str, ...]] = ()

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of the fixes that name this rule as evidence."""
        return tuple(fix.code for fix in known_fixes.handling(self.code, self.message))

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0]

    def section(self, name: str) -> str:
        """Return the paragraph that begins with `name:`; "" if there is none."""
        for paragraph in self.doc.split("\n\n"):
            if paragraph.strip().startswith(f"{name}:"):
                text = " ".join(paragraph.strip().removeprefix(f"{name}:").split())
                return text[:1].upper() + text[1:]
        return ""


_RULES: list[LogRule] = []
_NOTES: dict[str, list[Callable[[Any, Any], None]]] = {}

#: (rule of the ledger, the DEBUG line that it needs, what this line shows)
HIDDEN = (
    ("KVR004", "due", "granted and loaded tokens"),
    ("KVR007", "storing", "stored and skipped tokens"),
)


def finding(
    code: str, name: str, severity: Severity, on: list[str], symptom: bool = False
) -> Callable[[Callable[..., Answer | None]], Callable[..., Answer | None]]:
    def register(look: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        _RULES.append(LogRule(code, name, severity, tuple(on), look, look.__doc__ or "", symptom=symptom))
        return look

    return register


def note(on: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Register a function that keeps something of this kind of line (`log.state`) for rules to read."""

    def register(keep: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _NOTES.setdefault(on, []).append(keep)
        return keep

    return register


def notes() -> dict[str, list[Callable[[Any, Any], None]]]:
    """Return {kind of line: functions that are called before the rules}."""
    catalogue()
    return _NOTES


@lru_cache(maxsize=1)
def catalogue() -> tuple[LogRule, ...]:
    """Return every rule, in the order in which they run."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return tuple(_RULES)


@lru_cache(maxsize=1)
def rules() -> dict[str, tuple[LogRule, ...]]:
    """Return {kind of line: the rules that look at it}."""
    by_name: dict[str, tuple[LogRule, ...]] = {}
    for rule in catalogue():
        for name in rule.on:
            by_name[name] = (*by_name.get(name, ()), rule)
    return by_name


def ledger_rule(violated: Finding) -> LogRule:
    """Return a rule of the ledger as a rule for logs, for a violation that no finding explains."""
    known = next(rule for rule in RULES if rule.code == violated.code)
    doc = f"{known.name.replace('-', ' ').capitalize()}.\n\nCause: {known.doc}"
    return LogRule(known.code, known.name, Severity.WRONG, (), lambda log, line: None, doc, message=violated.message)
