"""The token ledger checks the events of each request against the rules. It imports neither vLLM nor LMCache.

In most known bugs, two token counts of a request disagree. The ledger compares the tokens that vLLM has computed, the
external cache has, a lookup has promised, vLLM has taken ("granted"), and the worker has loaded or stored. The events
come from live hooks, log lines, recorder files or the lab.
"""

from collections import deque
from typing import Any, NamedTuple

from kvfix.ledger import events as ev
from kvfix.ledger.events import Event
from kvfix.ledger.rules import RULES_FOR


class Finding(NamedTuple):
    """The result of a rule for an event. verdict: "violated", or "unknown" if the rule cannot be checked.

    earlier: the earlier event that `event` contradicts, if there is one.
    """

    code: str
    name: str
    verdict: str
    request: str
    message: str
    event: Event
    earlier: Event | None = None

    def __str__(self) -> str:
        return f"{self.code} {self.name} {self.request}: {self.message}"


#: {type of event: attribute of History that holds the last event of this type}
_LAST = {ev.LoadDue: "due", ev.Finished: "finished", ev.Leased: "lease", ev.LeaseEnded: "lease_ended"}


class History:
    """The state of one request, as far as its events show it. A count is None until an event reports the count."""

    def __init__(self, events_kept: int, sees_loads: bool) -> None:
        self.sees_loads = sees_loads
        self.events: deque[Event] = deque(maxlen=events_kept)
        #: False if the recording began after the request. Many counts are then unknown.
        self.recorded_from_start = False
        self.finished: ev.Finished | None = None
        self.lease: ev.Leased | None = None
        self.lease_ended: ev.LeaseEnded | None = None
        #: Tokens with KV in vLLM after the last scheduled step.
        self.computed: int | None = None
        #: The last lookup (Asked) since the request began to wait, and how many promised tokens vLLM takes (Granted).
        self.asked: ev.Asked | None = None
        self.granted: ev.Granted | None = None
        self.due: ev.LoadDue | None = None
        #: True if the request has been in a step since the last Granted event.
        self.admitted = False
        #: The last lookup that timed out. `timed_out_again`: True if the lookup directly followed another timeout.
        self.timed_out: ev.TimedOut | None = None
        self.timed_out_again = False
        #: Tokens from the request's start that the external cache has, or will have, according to the connector.
        self.stored_to: int | None = None

    def take(self, event: Any) -> None:
        """Add the event to the history. `Ledger.feed` calls this after the rules have checked the event."""
        kind = type(event)
        if kind is ev.Scheduled:
            self.computed = event.computed + event.tokens
            self.admitted = True
        elif kind is ev.Asked:
            self.asked, self.granted, self.admitted = event, None, False
        elif kind is ev.Granted:
            # After a load between steps, vLLM admits the request and calls update_state_after_alloc again, with 0.
            if event.external or self.admitted or self.granted is None or not self.granted.external:
                if self.admitted:
                    self.asked = None  # a streaming session continues with more input, without another lookup
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

    events_kept: events to keep per request, for reports. `forget` drops a finished request, after its check for leaks.
    sees_loads: False if the source of the events cannot read the connector's metadata and so reports no loads.
    """

    def __init__(self, events_kept: int = 64, sees_loads: bool = True) -> None:
        self.histories: dict[str, History] = {}
        self._events_kept = events_kept
        self._sees_loads = sees_loads

    def feed(self, event: Event) -> list[Finding]:
        """Return the findings of this event, in the order of the rules."""
        history = self.histories.get(event.request)
        if history is None or (history.finished is not None and isinstance(event, ev.Asked | ev.ReadsFrom)):
            # A new request reuses the id of a finished request.
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
        """Drop the history of a request that gets no more events."""
        self.histories.pop(request, None)
