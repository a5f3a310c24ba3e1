"""Turn log lines into events for `kvfix.ledger`, and remember requests. A line that lacks a value gives no event."""

import re
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix.ledger.events import Event
from kvfix_tools.diagnose.log_finding import HistoryEvent
from kvfix_tools.diagnose.log_line import Fields

#: Maximum number of requests to keep, so that memory does not grow with the log.
REQUESTS = 10_000
#: Maximum numbers of events and violations to keep for one request.
HISTORY, VIOLATED = 24, 8


class Request:
    """A request, with the (file, line) of each event, the fields of the last lookup, and the violated rules."""

    def __init__(self) -> None:
        self.places: deque[tuple[str, int]] = deque(maxlen=HISTORY)
        self.asked: dict[str, Any] | None = None
        self.violated: list[Finding] = []


class Requests(dict[str, Request]):
    """The requests of one ledger, by id. A request that this dictionary drops is also removed from the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        #: Number of requests that the log has named, including dropped requests.
        self.named = 0

    def __missing__(self, request: str) -> Request:
        if len(self) >= REQUESTS:
            for oldest in list(islice(self, REQUESTS // 4)):
                del self[oldest]
                self._ledger.forget(oldest)
        self.named += bool(request)
        return self.setdefault(request, Request())

    def history(self, request: str) -> list[HistoryEvent]:
        """Return the kept events of the request as texts with file and line."""
        history, known = self._ledger.histories.get(request), self.get(request)
        if not request or history is None or known is None:
            return []
        events, places = reversed(history.events), reversed(known.places)  # a reused id has more places than events
        return [HistoryEvent(event.text(), *place) for event, place in zip(events, places, strict=False)][::-1]


def _asked(ledger: Ledger, fields: Fields) -> list[Event]:
    total, hit, computed = fields["total"], fields.get("hit"), fields.get("computed")
    if hit is None:
        return [] if computed is None else [ev.Asked(fields["request"], total, computed, None, None)]
    need = fields["need"]
    if computed is None:
        # Before LMCache 0.3.14, the line lacks vLLM's computed tokens. `need` is hit - computed,
        # or hit - computed - 1 if the hit is the whole request (vllm_v1_adapter.py 0.3.13:1283).
        computed = hit - need - (hit == total)
    promised = 0 if "least" in fields else max(0, need)
    return [ev.Asked(fields["request"], total, computed, hit, promised)]


def _capped(ledger: Ledger, fields: Fields) -> list[Event]:
    """Lower the promise of the last lookup, because LMCache lowers the promise after logging the lookup. Return []."""
    history = ledger.histories.get(fields["request"])
    if history is not None and history.asked is not None:
        history.asked = history.asked._replace(promised=max(0, fields["capped"]))
    return []


def _due(ledger: Ledger, fields: Fields) -> list[Event]:
    """Return Granted and LoadDue. LMCache logs this line only after checking that vLLM takes all promised tokens."""
    request, computed = fields["request"], fields.get("computed")
    history = ledger.histories.get(request)
    if computed is None or history is None or history.asked is None or history.asked.promised is None:
        return []
    return [ev.Granted(request, history.asked.promised), ev.LoadDue(request, computed, fields["hit"])]


def _storing(ledger: Ledger, fields: Fields) -> list[Event]:
    history = ledger.histories.get(fields["request"])
    hit = history.asked.hit if history is not None and history.asked is not None else None
    return [ev.Stored(fields["request"], fields["skip"], fields["total"], hit or 0)]


def _retrieved(ledger: Ledger, fields: Fields) -> list[Event]:
    if not fields.get("request"):
        return []
    end = fields["total"] if "total" in fields else fields["required"]
    return [ev.Loaded(fields["request"], fields["tokens"], end)]


def _kv_failing(ledger: Ledger, fields: Fields) -> list[Event]:
    """Return a failed load for each request id in the line. vLLM then ends the requests."""
    return [ev.LoadFailed(request, None) for request in re.findall(r"'([^']+)'", fields["requests"])[:64]]


def _raised(ledger: Ledger, fields: Fields) -> list[Event]:
    """Return Raised. If the exception's text has the number of tokens that vLLM takes, return Granted before Raised."""
    request = fields.get("request", "")
    made: list[Event] = []
    history = ledger.histories.get(request)
    if fields["meaning"] == "mismatch" and history is not None and history.asked is not None:
        promised = history.asked.promised
        # After logging the promised tokens, LMCache may lower their number. Then vLLM rightly takes fewer tokens.
        if promised is not None and fields["granted"] > promised:
            made.append(ev.Granted(request, fields["granted"]))
    where = fields["frames"][-1][2] if fields["frames"] else "?"
    if request:
        made.append(
            ev.Raised(request, where, f"{fields['type']}: {fields['text']}" if fields["text"] else fields["type"])
        )
    return made


#: For each kind of line, the function that returns the line's events in order.
MAKERS: dict[str, Callable[[Ledger, Fields], list[Event]]] = {
    "asked": _asked,
    "capped": _capped,
    "due": _due,
    "storing": _storing,
    "retrieved": _retrieved,
    "load_failed": lambda _, fields: [ev.LoadFailed(fields["request"], None)],
    "kv_failing": _kv_failing,
    "aborted": lambda _, fields: [ev.Finished(fields["request"], True)],
    "raised": _raised,
}
