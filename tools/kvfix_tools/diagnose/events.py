"""Hits to events of the ledger. What a line does not tell is not made up: then there is no event."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from kvfix_tools.diagnose.case import Case
    from kvfix_tools.diagnose.seen import Seen


def of(case: Case, seen: Seen) -> list[Any]:
    """Events that this line tells, in their order."""
    make = _MAKERS.get(seen.name)
    return make(case, seen.fields, seen) if make is not None else []


def tells(name: str) -> bool:
    """Whether lines of this kind make events."""
    return name in _MAKERS


def _asked(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    total, hit, computed = fields["total"], fields.get("hit"), fields.get("computed")
    if hit is None:
        return [] if computed is None else [ev.Asked(fields["request"], total, computed, None, None)]
    need = fields["need"]
    if computed is None:
        # Before 0.3.14 the line leaves out what vLLM had, and prints hit - computed, less one if all is hit
        # (vllm_v1_adapter.py 0.3.13:1283), so that it can be told.
        computed = hit - need - (hit == total)
    promised = 0 if "least" in fields else max(0, need)
    return [ev.Asked(fields["request"], total, computed, hit, promised)]


def _capped(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    """The promise was taken back to this, after its line was printed. No event: it is the same answer."""
    story = case.ledger.stories.get(fields["request"])
    if story is not None and story.asked is not None:
        story.asked = story.asked._replace(promised=max(0, fields["capped"]))
    return []


def _due(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    """What is due was granted as promised: the connector asserts it before it prints this."""
    request, computed = fields["request"], fields.get("computed")
    story = case.ledger.stories.get(request)
    if computed is None or story is None or story.asked is None or story.asked.promised is None:
        return []
    start = story.asked.computed if computed is None else computed
    return [ev.Granted(request, story.asked.promised), ev.LoadDue(request, start, fields["hit"])]


def _storing(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    story = case.ledger.stories.get(fields["request"])
    hit = story.asked.hit if story is not None and story.asked is not None else None
    return [ev.Stored(fields["request"], fields["skip"], fields["total"], hit or 0)]


def _retrieved(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    request = fields.get("request")
    return [ev.Loaded(request, fields["tokens"], fields.get("total", fields["required"]))] if request else []


def _load_failed(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    return [ev.LoadFailed(fields["request"], None)]


def _kv_failing(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    """vLLM names the requests that it ends: a set or a list of ids."""
    return [ev.LoadFailed(request, None) for request in re.findall(r"'([^']+)'", fields["requests"])[:64]]


def _aborted(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    return [ev.Finished(fields["request"], True)]


def _raised(case: Case, fields: dict[str, Any], seen: Seen) -> list[Any]:
    """The exception, and before it what its text tells of the balance."""
    request = fields.get("request", "")
    made: list[Any] = []
    story = case.ledger.stories.get(request)
    if fields["meaning"] == "mismatch" and story is not None and story.asked is not None:
        promised = story.asked.promised
        # Where the load is capped the promise is less than the line said: then this tells nothing.
        if promised is not None and fields["granted"] > promised:
            made.append(ev.Granted(request, fields["granted"]))
    where = fields["frames"][-1][2] if fields["frames"] else "?"
    if request:
        made.append(
            ev.Raised(request, where, f"{fields['type']}: {fields['text']}" if fields["text"] else fields["type"])
        )
    return made


_MAKERS: dict[str, Callable[[Case, dict[str, Any], Seen], list[Any]]] = {
    "asked": _asked,
    "capped": _capped,
    "due": _due,
    "storing": _storing,
    "retrieved": _retrieved,
    "load_failed": _load_failed,
    "kv_failing": _kv_failing,
    "aborted": _aborted,
    "raised": _raised,
}
