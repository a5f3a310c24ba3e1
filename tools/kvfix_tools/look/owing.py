"""Who owes each request of an engine its next event, and how long to look until a verdict is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import liveness, owed, standstill
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE
from kvfix.ledger.looks import HOOK, LATE, moved, of_these_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.ledger.looks import Look
    from kvfix.ledger.owed import Engine


def first_refused(engine: Engine) -> str:
    """The request that the scheduler has no blocks for, and that the others wait behind; "" if there is none."""
    row = next((each for each, kind in owed.waits(engine) if kind == PLACE), None)
    short = row is not None and row["needs"] is not None and row["needs"] > engine.scheduler["pool"]["free"]
    return str(row["id"]) if row is not None and short else ""


def owner(engine: Engine, row: dict[str, Any]) -> str:
    """Who owes the next event of the request, and which."""
    queue, name = row["queue"], row["id"]
    if queue == "ended":
        ranks = engine.ranks_with(name, "stores", *owed.KINDS)
        return (
            f"{owed.ranks_text(ranks)}: its transfer, which keeps its blocks" if ranks else "no worker has its transfer"
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
        return "the scheduler: its load has failed"
    first = first_refused(engine)
    if first and first != name:
        return f"{first}, which stands before it"
    needs, free = row["needs"], engine.scheduler["pool"]["free"]
    if needs is None:
        return "the scheduler: a place in a step"
    return f"the pool: it needs {needs} blocks, {free} are free" if needs > free else "the scheduler: its next step"


def suspected(looks: Sequence[Look]) -> float:
    """For how many seconds the looks must go on before there is a verdict; 0: nothing is suspected, or it is there."""
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
