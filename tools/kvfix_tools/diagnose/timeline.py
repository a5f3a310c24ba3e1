"""Data for the HTML page: events of requests, and counters over time. Their size does not grow with the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger.events import Asked

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.log_line import LogLine

#: Seconds since 1970. A time before 2001 comes from a damaged line.
_LONG_AGO = 1e9
#: Maximum number of requests to draw.
DRAWN = 2000
#: Maximum number of intervals of the counters. Intervals get wider in longer logs.
BINS = 240
#: {kind of line: (counter, field to add)}
_COUNTED = {
    "retrieved": (("loaded tokens", "tokens"),),
    "mp_retrieved": (("loaded tokens", "tokens"),),
    "stored": (("stored tokens", "tokens"),),
    "mp_stored": (("stored tokens", "tokens"),),
    "stats": (("running", "running"), ("waiting", "waiting")),
}
#: Counters with a last value in an interval. The others have a sum.
_LEVELS = ("running", "waiting")
_COUNTERS = ("lookups", "hit tokens", "loaded tokens", "stored tokens", *_LEVELS)


class Mark(NamedTuple):
    """An event of a request. time: seconds by the log's clock."""

    time: float
    kind: str
    text: str


class Timeline:
    """Events and counters, which a diagnosis adds."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Mark]] = {}
        self.width = 1.0
        self.bins: dict[int, dict[str, float]] = {}
        self._now: float | None = None

    def event(self, event: Event, time: float | None) -> None:
        if time is None or time < _LONG_AGO:
            return
        if isinstance(event, Asked):
            # A repeated answer is no event: vLLM asks in every step until it has blocks.
            self.count(time, "lookups", 1)
            self.count(time, "hit tokens", event.hit or 0)
        marks = self.requests.get(event.request)
        if marks is None and len(self.requests) < DRAWN and event.request:
            marks = self.requests[event.request] = []
        if marks is not None and len(marks) < 200:
            # Times of vLLM's lines are whole seconds, so they may go back.
            time = max(time, marks[-1].time) if marks else time
            marks.append(Mark(time, type(event).__name__, event.text()))

    def line(self, line: LogLine) -> None:
        """Count every line, also if it is no event of the ledger."""
        if line.time is not None and line.time >= _LONG_AGO:
            self._now = line.time
        for counter, field in _COUNTED.get(line.name, ()):
            self.count(self._now, counter, float(line.fields.get(field, 0)))

    def count(self, time: float | None, name: str, value: float) -> None:
        """Add a value to the counter's interval. Double the width of the intervals if there are too many."""
        if time is None or time < _LONG_AGO:
            return
        self._add(int(time / self.width), name, value)
        if len(self.bins) > BINS:
            old, self.bins, self.width = self.bins, {}, self.width * 2
            for number in sorted(old):
                for counter, sum_ in old[number].items():
                    self._add(number // 2, counter, sum_)

    def _add(self, number: int, name: str, value: float) -> None:
        counters = self.bins.setdefault(number, {})
        counters[name] = value if name in _LEVELS else counters.get(name, 0) + value

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Return {counter: [(seconds, value)]} of the counters with a value, in the order of time."""
        # Empty neighbours make the curve zero between two intervals.
        numbers = sorted({number + step for number in self.bins for step in (-1, 0, 1)})
        return {
            name: [(number * self.width, self.bins.get(number, {}).get(name, 0.0)) for number in numbers]
            for name in _COUNTERS
            if any(counters.get(name) for counters in self.bins.values())
        }
