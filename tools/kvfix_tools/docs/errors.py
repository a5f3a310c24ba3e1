"""The index of messages: what a log says, and which finding and fix that is.

Messages are the releases' own statements that a finding is asked at (statements.json), and what the fixes quote as a
symptom. Which finding an exception is, kvfix-diagnose itself is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from kvfix import fix
from kvfix_tools.diagnose import findings, grammar, scan, statements
from kvfix_tools.diagnose.case import Case
from kvfix_tools.diagnose.findings import Rule, Severity
from kvfix_tools.docs.markdown import code, link, links, table

#: Kinds of lines that stand in every log; of their numbers only kvfix-diagnose can tell.
_ORDINARY = {"asked", "retrieved", "stats"}
_HEADINGS = {
    Severity.CRASH: "The engine dies",
    Severity.WRONG: "KV is not what it should be",
    Severity.HANG: "Nothing moves, or hardly",
    Severity.LEAK: "Kept too long, or let go twice",
    Severity.SLOW: "Slower than it should be",
    Severity.RISK: "May go wrong in silence",
}
#: Names of the texts of exceptions, and the finding of those that no other finding knows.
_RAISED = {message.name for message in grammar.MESSAGES if message.source == "raised"}
_UNKNOWN = "KVD199"
_VALUE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[diouxXeEfFgGcrs]|\{\}")
_EXCEPTION = """Traceback (most recent call last):
  File "/lmcache/integration/vllm/vllm_v1_adapter.py", line 1, in build_connector_meta
    assert True
AssertionError: {}
"""


class Entry(NamedTuple):
    """A message as it is logged, with an ellipsis for values; findings and fixes, in the order of their codes."""

    text: str
    findings: tuple[str, ...]
    fixes: tuple[str, ...]

    @property
    def severity(self) -> Severity | None:
        """The worst of its findings; None: no finding has it."""
        of = [rule.severity for rule in findings.catalogue() if rule.code in self.findings]
        return min(of, key=lambda severity: severity.value, default=None)


class _Draft:
    def __init__(self, findings: Iterable[str]) -> None:
        self.findings = set(findings)
        self.fixes: set[str] = set()


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    quoted = [(each, span) for each in fix.catalogue() for span in _quoted(each)]
    kinds = _RAISED | {kind for rule in findings.catalogue() for kind in rule.on} | {_kind(span) for _, span in quoted}
    drafts: dict[str, _Draft] = {}
    of_kind: dict[str, list[_Draft]] = {}
    for row in (row for rows in statements.known().values() for row in rows if row.message in kinds - _ORDINARY):
        text = ("AssertionError: " if row.level == "assert" else "") + _VALUE.sub("…", row.template.partition("\n")[0])
        draft = drafts.setdefault(" ".join(text.split()), _Draft(_of_kind(row.message)))
        of_kind.setdefault(row.message, []).append(draft)
    for each, span in quoted:
        kind = _kind(span)
        own = _Draft(_of_fix(each)) if kind not in of_kind and kind not in _ORDINARY else None
        for draft in of_kind.get(kind) or ([drafts.setdefault(span, own)] if own else []):
            draft.fixes.add(each.code)
    return tuple(sorted(_made(text, draft) for text, draft in drafts.items()))


def _made(text: str, draft: _Draft) -> Entry:
    rules = [rule for rule in findings.catalogue() if rule.code in draft.findings]
    fixes = draft.fixes | {code for rule in rules for code in rule.fixes}
    return Entry(text, tuple(rule.code for rule in rules), tuple(sorted(fixes)))


@lru_cache(maxsize=64)
def _of_kind(kind: str) -> frozenset[str]:
    """Findings of a kind of line. Where an exception's numbers decide, also those that need the lines before it."""
    if kind not in _RAISED:
        return frozenset(rule.code for rule in findings.catalogue() if kind in rule.on)
    told = _asked(kind)
    if len(told) < 2:
        return told
    fixes = {each for rule in findings.catalogue() if rule.code in told for each in rule.fixes}
    elsewhere = {code for other in _RAISED - {kind} for code in _asked(other)}
    return told | frozenset(rule.code for rule in _of_exceptions() if fixes & set(rule.fixes)) - elsewhere


@lru_cache(maxsize=64)
def _asked(kind: str) -> frozenset[str]:
    """Codes that kvfix-diagnose finds where an exception says this, with numbers equal, rising, falling."""
    told: set[str] = set()
    for template in {row.template for rows in statements.known().values() for row in rows if row.message == kind}:
        for step in (0, 1, -1):
            text = template
            for number in range(70, 70 + 10 * (step or 1), step or 1):
                text = _VALUE.sub(str(number if step else 70), text, count=1)
            case = Case()
            case.take("log", 1, scan.hits(_EXCEPTION.format(text).encode()))
            told |= {found.rule.code for found in case.end()}
    return frozenset(told - {_UNKNOWN})


def _of_exceptions() -> list[Rule]:
    return [rule for rule in findings.catalogue() if "raised" in rule.on]


def _of_fix(found: fix.Fix) -> set[str]:
    """Findings of the exceptions that this fix cures."""
    return {rule.code for rule in _of_exceptions() if found.code in rule.fixes}


def _quoted(found: fix.Fix) -> list[str]:
    """What the symptom quotes as a message: it has words, and a beginning."""
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", found.section("Symptom")))
    return [span for span in spans if " " in span and not span.startswith("...")]


def _kind(span: str) -> str:
    """Name of the kind of line of which this is a part; "": of none."""
    for message in grammar.MESSAGES:
        literal = message.literal.decode().strip()
        if message.source != "trace" and len(literal) > 12 and literal in span:
            return message.name
    return ""


def of_finding(rule: Rule) -> list[str]:
    """The messages that lead to this finding."""
    return [entry.text for entry in entries() if rule.code in entry.findings]


def page() -> str:
    sections = []
    for severity in (*Severity, None):
        rows = [(code(entry.text), _what(entry), links(entry.fixes, up="")) for entry in entries()
                if entry.severity == severity]  # fmt: skip
        heading = _HEADINGS[severity] if severity else "Also quoted by fixes"
        sections.append(f"## {heading}\n\n{table(('message', 'what it is', 'fix'), rows)}" if rows else "")
    return f"""# I see this error

The texts as vLLM and LMCache log them, in the wording of the releases that kvfix has read; `…` stands for a value.
Search this page for a few words of yours. Better: give the whole log to [kvfix-diagnose](diagnose.md), which reads the
numbers too, and tells what is normal from what is not:

    kvfix-diagnose engine.log

{chr(10).join(sections)}"""


def _what(entry: Entry) -> str:
    rules = [rule for rule in findings.catalogue() if rule.code in entry.findings]
    if len(rules) == 1:
        return f"{link(rules[0].code, up='')} {rules[0].title}"
    if rules:
        return "By its numbers: " + "; ".join(f"{link(rule.code, up='')} {rule.name}" for rule in rules)
    named = fix.find(entry.fixes[0]) if entry.fixes else None
    return named.title if named else ""
