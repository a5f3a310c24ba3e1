"""Compare looks at the processes of a running engine. Pure.

A look is the states of all processes (`kvfix.engine_state`). They are read one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.ledger import owed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvfix.ledger.owed import Engine

#: Seconds after which a hook counts as stuck.
HOOK = 3.0
#: Seconds after which a transfer or a lookup counts as not answered. LATE: if no request moves. LATER: if other
#: requests move.
LATE, LATER = 5.0, 30.0
#: Fields of a request that do not change during one wait.
_OF_A_WAIT = ("computed", "total", "preemptions")


class Look(NamedTuple):
    """at: seconds of any monotonic clock. processes: their states.

    A process that could not be read has no "schema", but {"pid", "name", "silent": reason, "stack", "hook"}.
    """

    at: float
    processes: list[dict[str, Any]]


def engines(looks: Sequence[Look]) -> Iterator[tuple[Engine, Engine, float]]:
    """Yield (engine at the first look, engine at the last look, seconds between)."""
    before = {engine.process["pid"]: engine for engine in owed.engines(looks[0].processes)}
    for engine in owed.engines(looks[-1].processes):
        if engine.process["pid"] in before:
            yield before[engine.process["pid"]], engine, looks[-1].at - looks[0].at


def rows(before: Engine, after: Engine, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the last look, for requests that wait for `kind` at both looks and have not changed.

    A request that was preempted or has more tokens may wait for another load than at the first look.
    """
    first = {row["id"]: row for row, waits_for in owed.waits(before) if waits_for == kind}
    for row, waits_for in owed.waits(after):
        old = first.get(row["id"])
        if old is not None and waits_for == kind and all(old[key] == row[key] for key in _OF_A_WAIT):
            yield row


def steps_between(before: Engine, after: Engine) -> int | None:
    """Return the number of steps that began between the looks; None: the release does not count them."""
    first, last = before.scheduler["steps"], after.scheduler["steps"]
    return None if first is None or last is None else int(last - first)


def is_current(before: Engine, after: Engine, span: float) -> bool:
    """Return True if two steps have ended: then a report that was on its way at the first look has arrived."""
    steps = steps_between(before, after)
    return span >= 2 * LATE if steps is None else steps > 2


def moved(looks: Sequence[Look]) -> bool:
    """Return True if any request has made progress or ended between the first and the last look."""
    for before, after, _ in engines(looks):
        last = {row["id"]: _progress(row) for row in after.requests}
        if any(last.get(row["id"]) != _progress(row) for row in before.requests):
            return True
    return False


def _progress(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[key] for key in _OF_A_WAIT), row["status"], row["queue"], row["report"])


def in_hooks(looks: Sequence[Look]) -> Iterator[tuple[dict[str, Any], Engine | None]]:
    """Yield each process that is in the same hook at every look, and its engine if it has the scheduler."""
    by_pid = {engine.process["pid"]: engine for engine in owed.engines(looks[-1].processes)}
    for process in looks[-1].processes:
        pid, hook = process["pid"], process.get("hook")
        same = [each for look in looks for each in look.processes if each["pid"] == pid and each.get("hook") == hook]
        if hook and len(same) == len(looks):
            yield process, by_pid.get(pid)


def of_these_hooks(looks: Sequence[Look]) -> Sequence[Look]:
    """Return the newest looks with the same processes in the same hooks as the last look, if there are two or more.

    Otherwise return all looks. A process that entered a hook after the first look may block all other processes, so
    earlier looks show another situation.
    """
    hooks = {each["pid"]: each["hook"] for each in looks[-1].processes if each.get("hook")}
    first = len(looks) - 1
    while first and hooks.items() <= {each["pid"]: each.get("hook") for each in looks[first - 1].processes}.items():
        first -= 1
    return looks[first:] if first < len(looks) - 1 else looks


def stands(looks: Sequence[Look], process: dict[str, Any]) -> bool:
    """Return True if a process that is in the same hook at every look has made no progress for `HOOK` seconds."""
    span = looks[-1].at - looks[0].at
    steps = {after.process["pid"]: steps_between(before, after) for before, after, _ in engines(looks)}
    count = steps.get(process["pid"])
    return span >= HOOK and not (moved(looks) if count is None else count > span / 2)
