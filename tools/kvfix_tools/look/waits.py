"""The event that each request of an engine waits for, and how long to look until a verdict is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import liveness, owed, standstill
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE
from kvfix.ledger.standstill import HOOK, LATE, moved, of_these_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.ledger.owed import Engine
    from kvfix.ledger.standstill import Look


def first_refused(engine: Engine) -> str:
    """Return the first request that waits for blocks, if the scheduler has too few free blocks for it; else "".

    Other requests wait behind it.
    """
    row = next((each for each, kind in owed.waits(engine) if kind == PLACE), None)
    short = row is not None and row["needs"] is not None and row["needs"] > engine.scheduler["pool"]["free"]
    return str(row["id"]) if row is not None and short else ""


def waits_for(engine: Engine, row: dict[str, Any]) -> str:
    """Return what the request waits for: who acts next, and on what."""
    queue, name = row["queue"], row["id"]
    if queue == "ended":
        ranks = engine.ranks_with(name, "stores", *owed.KINDS)
        return (
            f"{owed.ranks_text(ranks)}: its transfer, which holds its blocks" if ranks else "no worker has its transfer"
        )
    if queue not in QUEUES:
        return "the workers: its next tokens"
    kind = next(kind for each, kind in owed.waits(engine) if each["id"] == name)
    if kind == OUTSIDE:
        return owed.OUTSIDE_STATUSES[row["status"]]
    if kind == LOAD:
        ranks = engine.ranks_with(name, *owed.KINDS)
        if not ranks and not engine.sees_transfers:
            return "the connector: its load"
        return f"{owed.ranks_text(ranks)}: its load" if ranks else "no worker has its load"
    if kind == LOOKUP:
        return "the connector: its lookup"
    if row["report"] == "failed":
        return "the scheduler: to handle its failed load"
    first = first_refused(engine)
    if first and first != name:
        return f"{first}, which is before it in the queue"
    needs, free = row["needs"], engine.scheduler["pool"]["free"]
    if needs is None:
        return "the scheduler: to be scheduled in a step"
    return f"free blocks: it needs {needs}, {free} are free" if needs > free else "the scheduler: its next step"


def seconds_to_look(looks: Sequence[Look]) -> float:
    """Return how many more seconds a sure verdict needs; 0 if there is one, or no problem is suspected."""
    if standstill.verdicts(looks):
        return 0.0
    looks = of_these_hooks(looks)
    seconds = 0.0
    last = looks[-1].processes
    in_hook = any(each.get("hook") or each.get("silent") for each in last)
    for engine in owed.engines(last):
        waits = owed.waits(engine)
        if {kind for _, kind in waits} & {LOAD, LOOKUP} and not owed.state(engine).running:
            seconds = LATE
        lost = [row for row, kind in waits if kind == LOAD and not engine.ranks_with(row["id"], *owed.KINDS)]
        if lost or liveness.can_move(owed.state(engine)).verdict == "violated":
            seconds = max(seconds, 1.0)
    span = looks[-1].at - looks[0].at
    if len(looks) > 1 and span >= 1.0 and moved(looks):
        seconds = 0.0
    seconds = max(seconds, HOOK if in_hook else 0.0)
    return seconds if span < seconds else 0.0
