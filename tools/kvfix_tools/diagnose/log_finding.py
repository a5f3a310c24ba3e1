"""A finding in this input: its rule, where and how it shows, and the history of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvfix.ledger import Finding
    from kvfix_tools.diagnose.findings import Answer, LogRule
    from kvfix_tools.diagnose.log_line import Evidence, LogLine
    from kvfix_tools.diagnose.problems import Problem


class HistoryEvent(NamedTuple):
    """An event of a request's history in words, with the line that it comes from."""

    what: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.what}  ({self.file}:{self.line})"


class LogFinding:
    """violated: rules of the ledger that events of the request violate. first, last: seconds since 1970."""

    def __init__(
        self, rule: LogRule | Problem, answer: Answer, sentence: str, request: str, line: LogLine | None
    ) -> None:
        self.rule = rule
        self.sentence = sentence
        self.request = request
        self.verdict = answer.verdict
        self.count = 1
        self.evidence: list[Evidence] = [line.evidence] if line else []
        self.evidence += [each for each in answer.evidence if each not in self.evidence]
        self.first = self.last = line.time if line else None
        self.history: list[HistoryEvent] = []
        self.violated: list[Finding] = []

    def again(self, line: LogLine | None) -> None:
        """It shows at another line; None: at the end of the log."""
        self.count += 1
        if line is not None:
            self.last = self.last if line.time is None else line.time
            if len(self.evidence) < 5 and line.evidence not in self.evidence:
                self.evidence.append(line.evidence)

    @property
    def file(self) -> str | None:
        """Where it was found first; None: in no one line."""
        return self.evidence[0].file if self.evidence else None

    @property
    def order(self) -> tuple[int, str]:
        return (self.rule.severity.value, self.rule.code)
