"""The token ledger checks the events of each request against rules. This package imports neither vLLM nor LMCache.

In most known bugs, two token counts of a request disagree. The ledger compares six counts: computed by vLLM, found in
the external cache, promised by a lookup, taken by vLLM ("granted"), loaded, and stored. The events come from hooks of a
running engine, log lines, recorder files or runs of `kvfix lab`.
"""

from collections import deque
from typing import Any, NamedTuple

from kvfix.ledger import events as ev
from kvfix.ledger.events import Event
from kvfix.ledger.rules import RULES_FOR


class Finding(NamedTuple):
    """An event that violates a rule, or an event for which kvfix cannot check a rule."""

    code: str
    name: str
    verdict: str  # "violated", or "unknown" if the events do not suffice to check the rule
    request: str
    message: str
    event: Event
    earlier: Event | None = None  # the earlier event that `event` contradicts

    def __str__(self) -> str:
        return f"{self.code} {self.name} {self.request}: {self.message}"


#: {event type: attribute of `History` that keeps the last event of this type}
_LAST = {ev.LoadDue: "due", ev.Finished: "finished", ev.Leased: "lease", ev.LeaseEnded: "lease_ended"}


class History:
    """The state of one request, derived from its events. A count is None until an event reports the count."""

    def __init__(self, events_kept: int, sees_loads: bool) -> None:
        self.sees_loads = sees_loads
        self.events: deque[Event] = deque(maxlen=events_kept)
        #: False if the request is older than the recording, which then lacks the request's early events.
        self.recorded_from_start = False
        self.finished: ev.Finished | None = None
        self.lease: ev.Leased | None = None
        self.lease_ended: ev.LeaseEnded | None = None
        #: The number of tokens that have KV in vLLM after the last scheduled step.
        self.computed: int | None = None
        #: asked: the last lookup (None after a preemption, failed load or new input). granted: tokens that vLLM takes.
        self.asked: ev.Asked | None = None
        self.granted: ev.Granted | None = None
        self.due: ev.LoadDue | None = None
        #: True if a step has scheduled the request since its last lookup.
        self.admitted = False
        #: timed_out: the last lookup timeout. timed_out_again: True if another timeout directly preceded this timeout.
        self.timed_out: ev.TimedOut | None = None
        self.timed_out_again = False
        #: According to the connector, the external cache has, or will have, the request's first `stored_to` tokens.
        self.stored_to: int | None = None

    def take(self, event: Any) -> None:
        """Add an event that the rules have checked."""
        kind = type(event)
        if kind is ev.Scheduled:
            self.computed = event.computed + event.tokens
            self.admitted = True
        elif kind is ev.Asked:
            self.asked, self.granted, self.admitted = event, None, False
        elif kind is ev.Granted:
            # After a load between steps, vLLM calls update_state_after_alloc again, with 0 tokens. Skip this call.
            if event.external or self.admitted or self.granted is None or not self.granted.external:
                if self.admitted:
                    self.asked = None  # a streaming session got more input, and vLLM made no lookup for the input
                self.granted, self.due = event, None
        elif kind is ev.Stored:
            self.stored_to = max(self.stored_to or 0, event.end, event.covered)
        elif kind in (ev.Preempted, ev.LoadFailed):
            self.asked = self.granted = self.due = None
        elif kind is ev.TimedOut:
            self.timed_out_again = self.timed_out is not None and event.is_at_once_after(self.timed_out)
            self.timed_out = event
        elif kind in _LAST:
            setattr(self, _LAST[kind], event)
        self.events.append(event)


class Ledger:
    """Check events against the rules. The caller feeds the events in the order in which they happened.

    events_kept: maximum number of events of a request that the ledger keeps for reports.
    sees_loads: False if the source of the events cannot read the connector's metadata and so reports no loads.
    """

    def __init__(self, events_kept: int = 64, sees_loads: bool = True) -> None:
        self.histories: dict[str, History] = {}
        self._events_kept = events_kept
        self._sees_loads = sees_loads

    def feed(self, event: Event) -> list[Finding]:
        """Check one event. Return the findings in the order of the rules."""
        history = self.histories.get(event.request)
        if history is None or (history.finished is not None and isinstance(event, ev.Asked | ev.ReadsFrom)):
            # The request is new, even if a finished request had the same id.
            history = self.histories[event.request] = History(self._events_kept, self._sees_loads)
            history.recorded_from_start = isinstance(event, ev.Asked | ev.ReadsFrom)
        findings = []
        for rule in RULES_FOR.get(type(event), ()):
            found = rule.check(history, event)
            if found is not None:
                verdict, message, earlier = found
                findings.append(Finding(rule.code, rule.name, verdict, event.request, message, event, earlier))
        history.take(event)
        return findings

    def forget(self, request: str) -> None:
        self.histories.pop(request, None)
