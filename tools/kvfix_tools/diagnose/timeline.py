"""What the HTML page draws: spans of requests, and counters over time. Bounded, whatever the log's length."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger.events import Asked

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.log_line import LogLine

#: Seconds since 1970: what is before 2001 is no time, but a damaged line.
_LONG_AGO = 1e9
#: Requests that are drawn; what is longer ago than so many is not.
DRAWN = 2000
#: Intervals of the counters; they grow wider as the log goes on.
BINS = 240
#: {kind of line: (counter, the field that is added up)}
_COUNTED = {
    "retrieved": (("loaded tokens", "tokens"),),
    "mp_retrieved": (("loaded tokens", "tokens"),),
    "stored": (("stored tokens", "tokens"),),
    "mp_stored": (("stored tokens", "tokens"),),
    "stats": (("running", "running"), ("waiting", "waiting")),
}
_LEVELS = ("running", "waiting")
COUNTERS = ("lookups", "hit tokens", "loaded tokens", "stored tokens", *_LEVELS)


class Mark(NamedTuple):
    """An event on a request's line. time: seconds, as the log's clock has it."""

    time: float
    kind: str
    text: str


class Timeline:
    """Fed by a diagnosis with every line and every event."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Mark]] = {}
        self.width = 1.0
        self.bins: dict[int, dict[str, float]] = {}
        self._now: float | None = None

    def event(self, event: Event, time: float | None) -> None:
        if time is None or time < _LONG_AGO:
            return
        if isinstance(event, Asked):
            # Once for each answer: it is asked again on every step until there is room.
            self.count(time, "lookups", 1)
            self.count(time, "hit tokens", event.hit or 0)
        marks = self.requests.get(event.request)
        if marks is None and len(self.requests) < DRAWN and event.request:
            marks = self.requests[event.request] = []
        if marks is not None and len(marks) < 200:
            # vLLM's own lines have whole seconds only.
            time = max(time, marks[-1].time) if marks else time
            marks.append(Mark(time, type(event).__name__, event.text()))

    def line(self, line: LogLine) -> None:
        """Every line counts, also those that are nothing new to the ledger."""
        if line.time is not None and line.time >= _LONG_AGO:
            self._now = line.time
        for counter, field in _COUNTED.get(line.name, ()):
            self.count(self._now, counter, float(line.fields.get(field, 0)))

    def count(self, time: float | None, name: str, value: float) -> None:
        """Add to the counter's interval; of a level the last value stands."""
        if time is None or time < _LONG_AGO:
            return
        counters = self.bins.setdefault(int(time / self.width), {})
        counters[name] = value if name in _LEVELS else counters.get(name, 0) + value
        if len(self.bins) > BINS:
            self._widen()

    def _widen(self) -> None:
        old, self.bins, self.width = self.bins, {}, self.width * 2
        for number in sorted(old):
            counters = self.bins.setdefault(number // 2, {})
            for name, value in old[number].items():
                counters[name] = value if name in _LEVELS else counters.get(name, 0) + value

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """{counter: [(seconds, value)]}, in the order of time."""
        numbers = set(self.bins)
        # Nothing happened between two intervals that are apart: the curve goes down to zero, not across.
        numbers |= {number + 1 for number in self.bins} | {number - 1 for number in self.bins}
        return {
            name: [(number * self.width, self.bins.get(number, {}).get(name, 0.0)) for number in sorted(numbers)]
            for name in COUNTERS
            if any(name in counters for counters in self.bins.values())
        }
