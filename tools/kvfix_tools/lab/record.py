"""What has happened in a world, and what is wrong with it."""

from __future__ import annotations

from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev


class Record:
    """`log` of (step, event), `findings`, and `counts` of what a run must have done to mean something."""

    def __init__(self) -> None:
        self.steps = 0
        #: The world's own time, in seconds.
        self.seconds = 0.0
        self.ledger = Ledger()
        self.log: list[tuple[int, ev.Event]] = []
        self.findings: list[Finding] = []
        self.counts = dict.fromkeys(("preemptions", "loaded_tokens", "stored_tokens", "finished", "aborted"), 0)

    def tell(self, event: ev.Event) -> None:
        """The ledger's rules see it."""
        self.log.append((self.steps, event))
        self.findings += self.ledger.feed(event)

    def found(self, code: str, rule: str, name: str, message: str) -> None:
        """What only the lab can see: it has the slots and the requests."""
        self.findings.append(Finding(code, rule, "violated", name, message, self.log[-1][1]))

    def corrupt(self, name: str, message: str) -> None:
        self.found("LAB001", "wrong-content", name, message)
