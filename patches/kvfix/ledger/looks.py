"""Looks at the processes of a running engine, and what several of them have in common. Pure.

A look is the states of all processes at one time (`kvfix.engine_state`), which are not taken at the same instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.ledger import owed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvfix.ledger.owed import Engine

#: Seconds after which a hook is taken for stuck, a transfer or lookup for not answered while nothing moves, and either
#: while other requests move.
HOOK, LATE, LATER = 3.0, 5.0, 30.0
#: Of a request: the same for as long as it waits for one thing.
_OF_A_WAIT = ("computed", "total", "preemptions")


class Look(NamedTuple):
    """at: seconds of any monotonic clock. processes: the states. One that could not be read has no "schema", and
    {"pid", "name", "silent": why, "stack", "hook"}."""

    at: float
    processes: list[dict[str, Any]]


def engines(looks: Sequence[Look]) -> Iterator[tuple[Engine, Engine, float]]:
    """(at the first look, at the last, seconds between)."""
    before = {engine.process["pid"]: engine for engine in owed.engines(looks[0].processes)}
    for engine in owed.engines(looks[-1].processes):
        if engine.process["pid"] in before:
            yield before[engine.process["pid"]], engine, looks[-1].at - looks[0].at


def rows(before: Engine, after: Engine, kind: str) -> Iterator[dict[str, Any]]:
    """Requests that wait for this at both looks, and have not changed. The row of the last.

    One that was preempted meanwhile, or has a token more, may wait for another load than at the first look.
    """
    first = {row["id"]: row for row, waits_for in owed.waits(before) if waits_for == kind}
    for row, waits_for in owed.waits(after):
        old = first.get(row["id"])
        if old is not None and waits_for == kind and all(old[key] == row[key] for key in _OF_A_WAIT):
            yield row


def steps_between(before: Engine, after: Engine) -> int | None:
    """Steps that the scheduler has begun between the looks; None: its release does not count them."""
    first, last = before.scheduler["steps"], after.scheduler["steps"]
    return None if first is None or last is None else int(last - first)


def is_current(before: Engine, after: Engine, span: float) -> bool:
    """Whether a report that was on its way at the first look has arrived at the last: two steps have ended."""
    steps = steps_between(before, after)
    return span >= 2 * LATE if steps is None else steps > 2


def moved(looks: Sequence[Look]) -> bool:
    """Whether any request has gone on or ended between the first and the last look."""
    for before, after, _ in engines(looks):
        last = {row["id"]: _progress(row) for row in after.requests}
        if any(last.get(row["id"]) != _progress(row) for row in before.requests):
            return True
    return False


def _progress(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[key] for key in _OF_A_WAIT), row["status"], row["queue"], row["report"])


def in_hooks(looks: Sequence[Look]) -> Iterator[tuple[dict[str, Any], Engine | None]]:
    """Processes that are in the same hook at every look, at the last one, and the engine of a scheduler."""
    by_pid = {engine.process["pid"]: engine for engine in owed.engines(looks[-1].processes)}
    for process in looks[-1].processes:
        pid, hook = process["pid"], process.get("hook")
        same = [each for look in looks for each in look.processes if each["pid"] == pid and each.get("hook") == hook]
        if hook and len(same) == len(looks):
            yield process, by_pid.get(pid)


def of_these_hooks(looks: Sequence[Look]) -> Sequence[Look]:
    """The last looks, two or more, at which each process that is in a hook at the last one is in it; else all.

    Those before are of another time: who entered a hook after the first look may hold up all others.
    """
    hooks = {each["pid"]: each["hook"] for each in looks[-1].processes if each.get("hook")}
    first = len(looks) - 1
    while first and hooks.items() <= {each["pid"]: each.get("hook") for each in looks[first - 1].processes}.items():
        first -= 1
    return looks[first:] if first < len(looks) - 1 else looks


def stands(looks: Sequence[Look], process: dict[str, Any]) -> bool:
    """Whether a process that is in the same hook at every look does not move either, for `HOOK` seconds."""
    span = looks[-1].at - looks[0].at
    steps = {after.process["pid"]: steps_between(before, after) for before, after, _ in engines(looks)}
    count = steps.get(process["pid"])
    return span >= HOOK and not (moved(looks) if count is None else count > span / 2)
