"""The ledger: one story per request, and the rules looked at after each event."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.ledger import events as ev
from kvfix.ledger.rules import RULES_FOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger.events import Event


class Finding(NamedTuple):
    """A rule that an event violates (`verdict` "violated"), or that it could not judge ("unknown").

    earlier: the event that it contradicts, if one does.
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


class Story:
    """What is known of one request. A count is None while nobody has told it."""

    __slots__ = (
        "asked",
        "computed",
        "due",
        "events",
        "finished",
        "granted",
        "request",
        "seen_from_start",
        "sees_loads",
        "stored_to",
        "timed_out",
        "timed_out_again",
        "total",
        "waiting",
    )

    def __init__(self, request: str, history: int, sees_loads: bool = True) -> None:
        self.request = request
        self.sees_loads = sees_loads
        self.events: deque[Event] = deque(maxlen=history)
        #: False where the record began after the request did: then much is unknown.
        self.seen_from_start = False
        self.waiting = True
        self.finished: ev.Finished | None = None
        self.total: int | None = None
        #: Tokens with KV in vLLM once the last scheduled step is done.
        self.computed: int | None = None
        #: The last question since the request began to wait, and what vLLM took of the answer.
        self.asked: ev.Asked | None = None
        self.granted: ev.Granted | None = None
        self.due: ev.LoadDue | None = None
        #: The last lookup that timed out, and whether it was tried at once after another.
        self.timed_out: ev.TimedOut | None = None
        self.timed_out_again = False
        #: Tokens from the start that the external cache holds or was handed, as far as the connector knows.
        self.stored_to: int | None = None

    def take(self, event: Event) -> None:
        """Bring the story up to date. Called after the rules have seen the event against the story so far."""
        change = _CHANGES.get(type(event))
        if change is not None:
            change(self, event)
        self.events.append(event)

    def admits_after_load(self, event: ev.Granted) -> bool:
        """vLLM calls the hook again, with 0, when a request comes back from a load between steps."""
        return event.external == 0 and self.granted is not None and bool(self.granted.external)


def _asked(story: Story, event: ev.Asked) -> None:
    story.asked = event
    story.total = event.total
    story.granted = None


def _granted(story: Story, event: ev.Granted) -> None:
    if not story.admits_after_load(event):
        story.granted = event
        story.due = None


def _scheduled(story: Story, event: ev.Scheduled) -> None:
    story.computed = event.computed + event.tokens
    if event.first:
        story.waiting = False


def _due(story: Story, event: ev.LoadDue) -> None:
    story.due = event


def _stored(story: Story, event: ev.Stored) -> None:
    story.stored_to = max(story.stored_to or 0, event.end, event.covered)


def _waits_again(story: Story, event: ev.Preempted | ev.LoadFailed) -> None:
    story.waiting = True
    story.asked = story.granted = story.due = None


def _timed_out(story: Story, event: ev.TimedOut) -> None:
    story.timed_out_again = story.timed_out is not None and event.is_at_once_after(story.timed_out)
    story.timed_out = event


def _finished(story: Story, event: ev.Finished) -> None:
    story.finished = event


#: What an event changes in its story; the others are only kept.
_CHANGES: dict[type, Callable[[Story, Any], None]] = {
    ev.Asked: _asked,
    ev.Granted: _granted,
    ev.Scheduled: _scheduled,
    ev.LoadDue: _due,
    ev.Stored: _stored,
    ev.Preempted: _waits_again,
    ev.LoadFailed: _waits_again,
    ev.TimedOut: _timed_out,
    ev.Finished: _finished,
}


class Ledger:
    """Feed it events in the order in which they happened; it answers with what they violate.

    history: events kept per request, for the report. Memory is bounded by that and by the requests that are open;
    a finished one is kept until `forget`, so that what is left of it can be told.
    sees_loads: False if the source cannot tell which loads are due, as with a connector whose metadata nobody knows.
    """

    def __init__(self, history: int = 64, sees_loads: bool = True) -> None:
        self.stories: dict[str, Story] = {}
        self._history = history
        self._sees_loads = sees_loads

    def feed(self, event: Event) -> list[Finding]:
        """Findings of this event, in the order of their codes. Empty: nothing is wrong with it."""
        story = self.stories.get(event.request)
        if story is None or (story.finished is not None and isinstance(event, ev.Asked)):
            # A request id may be used again: then it is another request.
            story = self.stories[event.request] = Story(event.request, self._history, self._sees_loads)
            story.seen_from_start = isinstance(event, ev.Asked)
        findings = []
        for rule in RULES_FOR.get(type(event), ()):
            found = rule.check(story, event)
            if found is not None:
                verdict, message, earlier = found
                findings.append(Finding(rule.code, rule.name, verdict, event.request, message, event, earlier))
        story.take(event)
        return findings

    def forget(self, request: str) -> None:
        """The request is done with; nothing more will be told of it."""
        self.stories.pop(request, None)
