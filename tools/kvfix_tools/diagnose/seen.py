"""What one line shows, and what is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.diagnose import scan

if TYPE_CHECKING:
    from kvfix.ledger import Finding as Verdict
    from kvfix_tools.diagnose.findings import Rule


class Evidence(NamedTuple):
    """A line of the input."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Seen(NamedTuple):
    """A hit, where it is, and in what traceback if it is an exception (`raised` in its fields)."""

    name: str
    fields: dict[str, Any]
    #: Seconds since 1970, as the log's clock has it.
    time: float | None
    process: str
    file: str
    line: int
    body: bytes
    stamp: bytes

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.file, self.line, scan.text(self.body))

    @property
    def request(self) -> str:
        return str(self.fields.get("request", ""))


class Told(NamedTuple):
    """A ledger event in a story, with the line that told it."""

    what: str
    file: str
    line: int


class Found:
    """A finding: its rule, and where and how it shows in this input."""

    def __init__(self, rule: Rule, sentence: str, seen: Seen | None, request: str, verdict: str) -> None:
        self.rule = rule
        self.sentence = sentence
        self.request = request
        self.verdict = verdict
        self.count = 1
        self.evidence: list[Evidence] = [seen.evidence] if seen else []
        self.first = self.last = seen.time if seen else None
        self.story: list[Told] = []
        self.verdicts: list[Verdict] = []

    @property
    def file(self) -> str | None:
        """Where it was found first; None: in no one line."""
        return self.evidence[0].file if self.evidence else None

    @property
    def order(self) -> tuple[int, str]:
        return (self.rule.severity.value, self.rule.code)
