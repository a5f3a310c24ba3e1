"""A problem that kvfix found in the log, with the log lines that show the problem, and the request's history."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from kvfix.ledger import Finding
from kvfix_tools.diagnose.findings import Answer, Severity
from kvfix_tools.diagnose.log_line import Evidence, LogLine
from kvfix_tools.diagnose.problems import Problem


class HistoryEvent(NamedTuple):
    """A text about an event in a request's history, and the log line that shows the event."""

    what: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.what}  ({self.file}:{self.line})"


class LogFinding:
    """A problem that kvfix found in the log.

    violated: rules of kvfix.ledger that the request's events violate. first, last: times of the first and last line.
    ran: {distribution: the last release that the log file named before the finding's first line}.
    """

    def __init__(self, rule: Problem, answer: Answer, sentence: str, request: str, line: LogLine | None) -> None:
        self.rule = rule
        self.severity = Severity.NOTE if answer.note else rule.severity
        #: Number of lines that the diagnosis had read when the problem began.
        self.began = math.inf
        #: True if another program may have logged the line. If no engine wrote the log, the finding becomes a note.
        self.is_foreign = False
        #: The finding that is the cause of this finding, or None.
        self.follows: LogFinding | None = None
        self.sentence = sentence
        self.request = request
        self.process = line.process if line is not None else ""
        self.verdict = "violated" if answer.sure else "unknown"
        self.count = 1
        self.evidence: list[Evidence] = [line.evidence] if line else []
        self.evidence += [each.evidence for each in answer.evidence if each.evidence not in self.evidence]
        self.first = self.last = line.time if line else None
        self.history: list[HistoryEvent] = []
        self.violated: list[Finding] = []
        self.ran: dict[str, str] = {}

    def again(self, line: LogLine | None) -> None:
        """Count the finding once more, at this line, or at the end of the log if `line` is None."""
        self.count += 1
        if line is not None:
            self.last = self.last if line.time is None else line.time
            if len(self.evidence) < 5 and line.evidence not in self.evidence:
                self.evidence.append(line.evidence)

    def is_explained(self, others: Iterable[LogFinding]) -> bool:
        """Return True if specific findings in `others` explain the traceback below each line of this finding."""
        rules = ((other, other.rule) for other in others if other is not self)
        specific = [other for other, rule in rules if rule.signs and (not rule.general or rule.certain)]
        ends = [each for other in specific for each in other.evidence]
        return bool(self.evidence) and all(
            any(end.file == each.file and 0 < end.line - each.line <= 80 for end in ends) for each in self.evidence
        )

    @property
    def file(self) -> str | None:
        """The file of the finding's first line, or None if the finding has no line."""
        return self.evidence[0].file if self.evidence else None

    @property
    def is_note(self) -> bool:
        return self.severity is Severity.NOTE

    @property
    def is_certain(self) -> bool:
        return self.verdict == "violated" and not self.is_note


def in_order(findings: list[LogFinding]) -> list[LogFinding]:
    """Return the causes, then the consequences, risks and notes. In each group, the earliest finding is first."""
    troubles = sorted(
        (found for found in findings if found.severity not in (Severity.RISK, Severity.NOTE)),
        key=lambda found: found.began,
    )
    # If all findings are symptoms, the first symptom counts as the cause.
    causes = [found for found in troubles if not found.rule.symptom] or troubles[:1]
    for found in findings:
        before = [each for each in causes if each.began <= found.began or each.file != found.file]
        # A symptom follows from the last cause that began before the symptom or is in another file. A symptom without
        # a line follows from the first cause.
        follows = before and found.rule.symptom and found not in causes
        found.follows = before[0 if math.isinf(found.began) else -1] if follows else None
    tiers = {Severity.RISK: 2, Severity.NOTE: 3}
    return sorted(findings, key=lambda found: (tiers.get(found.severity, int(found not in causes)), found.began))


def by_kind(findings: list[LogFinding]) -> list[list[LogFinding]]:
    """Group findings by rule, and keep their order. A rule about crashes has one finding for each request."""
    kinds: dict[str, list[LogFinding]] = {}
    for found in findings:
        kinds.setdefault(found.rule.code, []).append(found)
    return list(kinds.values())
