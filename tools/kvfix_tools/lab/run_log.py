"""What has happened in a run of the lab, and what is wrong with it."""

from __future__ import annotations

from collections import Counter

from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix_tools.lab.rules import LabRule

#: What a run counts: tokens of loads and stores, steps without a free block and with a transfer or lookup of the
#: multi-process server in flight, evicted chunks; requests, calls and answers else.
#: A store of the in-process connector ends within its step: no request is aborted in one.
COUNTED = (
    "preemptions", "loaded_tokens", "stored_tokens", "finished", "full_steps", "aborted", "aborted_waiting",
    "aborted_running", "aborted_preempted", "aborted_looking", "aborted_loading", "aborted_storing", "ids_used_again",
    "resets", "evicted", "evicted_pinned", "loads_failed", "loads_partial", "lookups_unanswered", "busy_steps",
    "loaded_beside",
)  # fmt: skip


class RunLog:
    """`events`: (step, event). `findings`: what rules say of them. `counts`: what a run must have done to prove it."""

    def __init__(self) -> None:
        self.steps = 0
        #: The lab's own time, in seconds.
        self.seconds = 0.0
        self.ledger = Ledger()
        self.events: list[tuple[int, ev.Event]] = []
        self.findings: list[Finding] = []
        self.counts = Counter(dict.fromkeys(COUNTED, 0))

    def add(self, event: ev.Event) -> None:
        """The ledger's rules look at it."""
        self.events.append((self.steps, event))
        self.findings += self.ledger.feed(event)

    def violated(self, rule: LabRule, request: str, message: str) -> None:
        """A rule of the lab's own is violated."""
        self.findings.append(self.finding(rule, request, message))

    def finding(self, rule: LabRule, request: str, message: str) -> Finding:
        return Finding(rule.code, rule.name, "violated", request, message, self.events[-1][1])
