"""Lines to events of the ledger. What does not stand in a line is not made up: then there is no event."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from kvfix.ledger import Ledger
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.log_line import Fields


def _asked(ledger: Ledger, fields: Fields) -> list[Event]:
    total, hit, computed = fields["total"], fields.get("hit"), fields.get("computed")
    if hit is None:
        return [] if computed is None else [ev.Asked(fields["request"], total, computed, None, None)]
    need = fields["need"]
    if computed is None:
        # Before 0.3.14 the line leaves out what vLLM had, and prints hit - computed, less one if all is hit
        # (vllm_v1_adapter.py 0.3.13:1283), so that it follows.
        computed = hit - need - (hit == total)
    promised = 0 if "least" in fields else max(0, need)
    return [ev.Asked(fields["request"], total, computed, hit, promised)]


def _capped(ledger: Ledger, fields: Fields) -> list[Event]:
    """The promise was lowered to this, after its line was printed. No event: it is the same answer."""
    history = ledger.histories.get(fields["request"])
    if history is not None and history.asked is not None:
        history.asked = history.asked._replace(promised=max(0, fields["capped"]))
    return []


def _due(ledger: Ledger, fields: Fields) -> list[Event]:
    """What is due was granted as promised: the connector asserts it before it prints this."""
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


def _load_failed(ledger: Ledger, fields: Fields) -> list[Event]:
    return [ev.LoadFailed(fields["request"], None)]


def _kv_failing(ledger: Ledger, fields: Fields) -> list[Event]:
    """vLLM names the requests that it ends: a set or a list of ids."""
    return [ev.LoadFailed(request, None) for request in re.findall(r"'([^']+)'", fields["requests"])[:64]]


def _aborted(ledger: Ledger, fields: Fields) -> list[Event]:
    return [ev.Finished(fields["request"], True)]


def _raised(ledger: Ledger, fields: Fields) -> list[Event]:
    """The exception, and before it the grant that its text names."""
    request = fields.get("request", "")
    made: list[Event] = []
    history = ledger.histories.get(request)
    if fields["meaning"] == "mismatch" and history is not None and history.asked is not None:
        promised = history.asked.promised
        # Where the load is capped the promise is less than in the line of the lookup: then nothing follows from this.
        if promised is not None and fields["granted"] > promised:
            made.append(ev.Granted(request, fields["granted"]))
    where = fields["frames"][-1][2] if fields["frames"] else "?"
    if request:
        made.append(
            ev.Raised(request, where, f"{fields['type']}: {fields['text']}" if fields["text"] else fields["type"])
        )
    return made


#: {kind of line: the function that makes its events, in their order}
MAKERS: dict[str, Callable[[Ledger, Fields], list[Event]]] = {
    make.__name__.removeprefix("_"): make
    for make in (_asked, _capped, _due, _storing, _retrieved, _load_failed, _kv_failing, _aborted, _raised)
}
