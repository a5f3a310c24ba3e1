"""What pages and traces draw: spans of requests, and counters over time. Bounded, whatever the log's length."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvfix.ledger.wording import line
from kvfix_tools.diagnose import scan

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
COUNTERS = ("lookups", "hit tokens", "loaded tokens", "stored tokens", "running", "waiting")


class Mark(NamedTuple):
    """An event on a request's line. time: seconds, as the log's clock has it."""

    time: float
    kind: str
    text: str


class Timeline:
    """Fed by a case with every event, and with the statistics of vLLM."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Mark]] = {}
        self.width = 1.0
        self.bins: dict[int, dict[str, float]] = {}
        self._now: float | None = None

    def take(self, event: Any, time: float | None) -> None:
        if time is None or time < 1e9:  # vLLM's lines have no year
            return
        if type(event).__name__ == "Asked":
            # Once for each answer: it is asked again on every step until there is room.
            self.count(time, "lookups", 1)
            self.count(time, "hit tokens", event.hit or 0)
        marks = self.requests.get(event.request)
        if marks is None and len(self.requests) < DRAWN and event.request:
            marks = self.requests[event.request] = []
        if marks is not None and len(marks) < 200:
            marks.append(Mark(time, type(event).__name__, line(event)))

    def hit(self, name: str, groups: scan.Groups, time: float | None) -> None:
        """Every line counts, also those that are nothing new to the ledger."""
        if time is not None and time >= 1e9:
            self._now = time
        counted = _COUNTED.get(name)
        if counted is None:
            return
        fields = scan.fields(name, groups)
        for counter, field in counted:
            self.count(self._now, counter, float(fields.get(field, 0)), level=name == "stats")

    def count(self, time: float | None, name: str, value: float, level: bool = False) -> None:
        """Add to the counter's interval; `level`: the value stands, it is no sum."""
        if time is None or time < 1e9:
            return
        slot = self.bins.setdefault(int(time / self.width), {})
        slot[name] = value if level else slot.get(name, 0) + value
        if len(self.bins) > BINS:
            self._widen()

    def _widen(self) -> None:
        old, self.bins, self.width = self.bins, {}, self.width * 2
        for number in sorted(old):
            slot = self.bins.setdefault(number // 2, {})
            for name, value in old[number].items():
                slot[name] = value if name in ("running", "waiting") else slot.get(name, 0) + value

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """{counter: [(seconds, value)]}, in the order of time."""
        numbers = set(self.bins)
        # Nothing happened between two intervals that are apart: the curve goes down to zero, not across.
        numbers |= {number + 1 for number in self.bins} | {number - 1 for number in self.bins}
        return {
            name: [(number * self.width, self.bins.get(number, {}).get(name, 0.0)) for number in sorted(numbers)]
            for name in COUNTERS
            if any(name in slot for slot in self.bins.values())
        }
