"""Make the index of messages, which shows the findings and fixes for each text in a log.

Messages are texts in statements.json for which a rule can report a finding, and texts that a fix's Symptom quotes.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from kvfix import catalogue
from kvfix.fixes.record import Fix
from kvfix_tools.diagnose import grammar, problems, statements
from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Problem
from maintain.documentation.markdown import code, filtered, link, links

#: Kinds of lines that every log has. The index omits these lines, because only the values in a line show a problem.
_ORDINARY = {"asked", "retrieved", "stats"}
#: Names of the kinds of lines whose text is an exception's text (source `raised` in the grammar).
RAISED = {message.name for message in grammar.MESSAGES if message.source == "raised"}
#: Markdown for code: a text between backticks, or between double backticks if the text has a backtick.
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
#: A span that begins with one of these texts is a command, an option, or only the end of a message.
_NO_MESSAGES = ("...", ", ", "kvfix ", "py-spy ", "lmcache server", "--", "POST ")


class Entry(NamedTuple):
    """A message with an ellipsis for each value, and its findings and fixes in the order of their codes."""

    text: str
    rules: tuple[Problem, ...]
    fixes: tuple[str, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        return tuple(rule.code for rule in self.rules)

    @property
    def severity(self) -> Severity | None:
        """The severity of the message's worst finding, or None if the message has no finding."""
        return min((rule.severity for rule in self.rules), key=lambda severity: severity.value, default=None)


def kinds() -> set[str]:
    return RAISED | set(problems.rules())


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    quoted = [(fix, span) for fix in catalogue.fixes() for span in _quoted(fix)]
    looked_at, rules = kinds() | {_kind(span) for _, span in quoted}, problems.catalogue()
    of_exceptions = [rule for rule in rules if {"raised", *RAISED} & set(rule.on)]
    found: dict[str, tuple[set[str], set[str]]] = {}  # {text: (codes of findings, codes of fixes)}
    texts: dict[str, list[str]] = {}  # {kind of line: texts of this kind}
    for row in (row for rows in statements.known().values() for row in rows if row.message in looked_at - _ORDINARY):
        prefix = "AssertionError: " if row.level == "assert" else ""
        text = " ".join((prefix + statements.sample(row.template.partition("\n")[0], "…")).split())
        found.setdefault(text, ({rule.code for rule in problems.rules().get(row.message, ())}, set()))
        texts.setdefault(row.message, []).append(text)
    for fix, span in quoted:
        kind = _kind(span)
        if kind not in texts and kind not in _ORDINARY:
            found.setdefault(span, ({rule.code for rule in of_exceptions if fix.code in rule.fixes}, set()))
        for text in texts.get(kind, [] if kind in _ORDINARY else [span]):
            found[text][1].add(fix.code)
    made = []
    for text, (codes, fixes) in sorted(found.items()):
        its = tuple(rule for rule in rules if rule.code in codes)
        made.append(Entry(text, its, tuple(sorted(fixes.union(*(rule.fixes for rule in its))))))
    return tuple(made)


def _quoted(fix: Fix) -> list[str]:
    """Return the messages that the fix's symptom quotes, that is, the symptom's code spans with several words."""
    spans = (" ".join(found[2].split()) for found in _SPAN.finditer(fix.section("Symptom")))
    return [span for span in spans if " " in span and not span.startswith(_NO_MESSAGES)]


def _kind(span: str) -> str:
    """Return the kind of line to which this text belongs, or "" if the text belongs to no kind."""
    for message in grammar.MESSAGES:
        literal = message.literal.decode().strip()
        if len(literal) > 12 and literal in span:
            return message.name
    return ""


def of_finding(rule: Problem) -> list[str]:
    return [entry.text for entry in entries() if rule in entry.rules]


def messages() -> str:
    ordered = sorted(entries(), key=lambda entry: entry.severity.value if entry.severity else len(Severity))
    rows = [(code(entry.text), *_about(entry), links(entry.fixes, up="")) for entry in ordered]
    return filtered(("message", "effect", "what it is", "fix"), rows)


def _about(entry: Entry) -> tuple[str, str]:
    """Return the cells `effect` and `what it is`. If the entry has no finding, describe the entry's first fix."""
    effect = entry.severity.word if entry.severity else ""
    if len(entry.rules) == 1:
        return effect, f"{link(entry.rules[0].code, up='')} {entry.rules[0].title}"
    if entry.rules:
        return effect, "One of: " + "; ".join(f"{link(rule.code, up='')} {rule.name}" for rule in entry.rules)
    fix = catalogue.find(entry.fixes[0])
    return (fix.effect, fix.title) if fix else ("", "")
