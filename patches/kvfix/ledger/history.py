"""The ledger: one history per request, and the check of the rules at each event."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.ledger import events as ev
from kvfix.ledger.rules import RULES_FOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger.events import Event


class Finding(NamedTuple):
    """A rule that an event violates (`verdict` "violated"), or that cannot be checked ("unknown").

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


class History:
    """The known state of one request. A count is None until an event has it."""

    def __init__(self, events_kept: int, sees_loads: bool) -> None:
        self.sees_loads = sees_loads
        self.events: deque[Event] = deque(maxlen=events_kept)
        #: False if the record began after the request: many counts are then unknown.
        self.recorded_from_start = False
        self.finished: ev.Finished | None = None
        self.lease: ev.Leased | None = None
        self.lease_ended: ev.LeaseEnded | None = None
        #: Tokens with KV in vLLM after the last scheduled step.
        self.computed: int | None = None
        #: The last Asked event since the request began to wait, and what vLLM granted of the promise.
        self.asked: ev.Asked | None = None
        self.granted: ev.Granted | None = None
        self.due: ev.LoadDue | None = None
        #: True if a step with the last grant has begun.
        self.admitted = False
        #: The last lookup that timed out. `timed_out_again`: it directly followed another timeout.
        self.timed_out: ev.TimedOut | None = None
        self.timed_out_again = False
        #: Tokens from the start that the external cache has or gets, according to the connector.
        self.stored_to: int | None = None

    def take(self, event: Event) -> None:
        """Add the event to the history. Called after the rules have checked the event against the history so far."""
        kind: type = type(event)
        if kind in _LAST:
            setattr(self, _LAST[kind], event)
        elif kind in _CHANGES:
            _CHANGES[kind](self, event)
        self.events.append(event)

    def admits_after_load(self, event: ev.Granted) -> bool:
        """vLLM calls the hook again, with 0, when it admits a request after a load between steps."""
        return event.external == 0 and self.granted is not None and bool(self.granted.external) and not self.admitted


def _asked(history: History, event: ev.Asked) -> None:
    history.asked = event
    history.granted = None
    history.admitted = False


def _granted(history: History, event: ev.Granted) -> None:
    if not history.admits_after_load(event):
        if history.admitted:
            history.asked = None  # a session continues with more input: vLLM does not ask
        history.granted = event
        history.due = None


def _scheduled(history: History, event: ev.Scheduled) -> None:
    history.computed = event.computed + event.tokens
    history.admitted = True


def _stored(history: History, event: ev.Stored) -> None:
    history.stored_to = max(history.stored_to or 0, event.end, event.covered)


def _waits_again(history: History, event: ev.Preempted | ev.LoadFailed) -> None:
    history.asked = history.granted = history.due = None


def _timed_out(history: History, event: ev.TimedOut) -> None:
    history.timed_out_again = history.timed_out is not None and event.is_at_once_after(history.timed_out)
    history.timed_out = event


#: {type of event: attribute of the history with the last event of this type}.
_LAST: dict[type, str] = {ev.LoadDue: "due", ev.Finished: "finished", ev.Leased: "lease", ev.LeaseEnded: "lease_ended"}
#: {type of event: how it changes the history}. Events in neither table are only kept.
_CHANGES: dict[type, Callable[[History, Any], None]] = {
    ev.Asked: _asked,
    ev.Granted: _granted,
    ev.Scheduled: _scheduled,
    ev.Stored: _stored,
    ev.Preempted: _waits_again,
    ev.LoadFailed: _waits_again,
    ev.TimedOut: _timed_out,
}


class Ledger:
    """Checks events, fed in the order in which they happened, against the rules.

    events_kept: maximum events kept per request, for the report. A finished request is kept until `forget`, so that its
    leaks can be reported.
    sees_loads: False if the source cannot see loads: the metadata of the connector are unknown.
    """

    def __init__(self, events_kept: int = 64, sees_loads: bool = True) -> None:
        self.histories: dict[str, History] = {}
        self._events_kept = events_kept
        self._sees_loads = sees_loads

    def feed(self, event: Event) -> list[Finding]:
        """Return the findings of this event, in the order of the rules."""
        history = self.histories.get(event.request)
        if history is None or (history.finished is not None and isinstance(event, ev.Asked | ev.ReadsFrom)):
            # A reused request id is another request.
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
