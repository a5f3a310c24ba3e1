"""The requests of a log: lines of their events, violations, and last lookup. The oldest requests are forgotten."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose.log_finding import HistoryEvent

if TYPE_CHECKING:
    from kvfix.ledger import Finding, Ledger

#: Maximum number of requests to keep, so that memory does not grow with the log.
REQUESTS = 10_000
#: Maximum numbers of events and violations to keep for one request.
HISTORY, VIOLATED = 24, 8


class Request:
    """A request. places: (file, line) of its events. asked: fields of its last lookup. violated: violated rules."""

    def __init__(self) -> None:
        self.places: deque[tuple[str, int]] = deque(maxlen=HISTORY)
        self.asked: dict[str, Any] | None = None
        self.violated: list[Finding] = []


class Requests:
    """The requests of one ledger. A forgotten request is removed from the ledger too."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[str, Request] = {}
        #: Number of requests that the log names.
        self.named = 0

    def get(self, request: str) -> Request | None:
        return self._kept.get(request)

    def known(self, request: str) -> Request:
        known = self._kept.get(request)
        if known is None:
            if len(self._kept) >= REQUESTS:
                for oldest in list(islice(self._kept, REQUESTS // 4)):
                    del self._kept[oldest]
                    self._ledger.forget(oldest)
            known = self._kept[request] = Request()
            self.named += bool(request)
        return known

    def history(self, request: str) -> list[HistoryEvent]:
        """Return the request's events so far as text, each with its line."""
        history, known = self._ledger.histories.get(request), self._kept.get(request)
        if not request or history is None or known is None:
            return []
        events, places = reversed(history.events), reversed(known.places)  # one may be longer than the other
        return [HistoryEvent(event.text(), *place) for event, place in zip(events, places, strict=False)][::-1]
