"""What has happened in a world, and what is wrong with it."""

from __future__ import annotations

from collections import Counter

from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev

#: What a run counts: tokens of loads and stores, steps without a free block and with a transfer or lookup of the
#: multi-process server under way, evicted chunks; requests, calls and answers else.
#: A store of the in-process connector ends within its step: nobody is aborted in one.
COUNTED = (
    "preemptions",
    "loaded_tokens",
    "stored_tokens",
    "finished",
    "full_steps",
    "aborted",
    "aborted_waiting",
    "aborted_running",
    "aborted_preempted",
    "aborted_looking",
    "aborted_loading",
    "aborted_storing",
    "ids_used_again",
    "resets",
    "evicted",
    "evicted_pinned",
    "loads_failed",
    "loads_partial",
    "lookups_unanswered",
    "busy_steps",
    "loaded_beside",
)


class Record:
    """`log` of (step, event), `findings`, and `counts` of what a run must have done to mean something."""

    def __init__(self) -> None:
        self.steps = 0
        #: The world's own time, in seconds.
        self.seconds = 0.0
        self.ledger = Ledger()
        self.log: list[tuple[int, ev.Event]] = []
        self.findings: list[Finding] = []
        self.counts = Counter(dict.fromkeys(COUNTED, 0))

    def tell(self, event: ev.Event) -> None:
        """The ledger's rules see it."""
        self.log.append((self.steps, event))
        self.findings += self.ledger.feed(event)

    def found(self, code: str, rule: str, name: str, message: str) -> None:
        """What only the lab can see: it has the slots and the requests."""
        self.findings.append(Finding(code, rule, "violated", name, message, self.log[-1][1]))

    def corrupt(self, name: str, message: str) -> None:
        self.found("LAB001", "wrong-content", name, message)
