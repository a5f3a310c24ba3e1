"""Decide if the waiting requests of an engine can move. Pure: it imports no engine.

vLLM tries to admit its waiting requests in order and stops at the first request that it has no blocks for (`schedule`,
the `break` after `allocate_slots`; v1/core/sched/scheduler.py 0.32.0:1275-1282). This request waits until a step of a
running request, a transfer or a lookup ends. If nothing runs and nothing is in flight, the request waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: A request waits for free blocks (PLACE), for its load, for the answer to its lookup, or for something outside the
#: engine: the next part of a streamed prompt, or a grammar.
PLACE, LOAD, LOOKUP, OUTSIDE = "place", "load", "lookup", "outside"


@dataclass(frozen=True)
class Waiting:
    """A waiting request.

    needs: free blocks that vLLM needs to admit it, including blocks reserved for other requests; None: unknown.
    holds: blocks that the request has already, for example because its load has ended.
    """

    name: str
    waits_for: str = PLACE
    needs: int | None = None
    holds: int = 0


@dataclass(frozen=True)
class State:
    """The state of an engine between two steps. None: not known."""

    #: In the order in which the scheduler admits them.
    waiting: tuple[Waiting, ...]
    #: Free blocks, including blocks with a cached prefix.
    free: int | None
    running: int | None
    #: Loads and stores that are not reported as ended, and reports that the scheduler has not used yet.
    in_flight: int | None
    #: Lookups that will be answered.
    lookups: int | None


class Answer(NamedTuple):
    """verdict: valid, violated or unknown. message: the arithmetic. request: the first one that cannot move."""

    verdict: str
    message: str
    request: str = ""


def can_move(state: State) -> Answer:
    """Return "valid" if any waiting request can still move, "violated" if none can."""
    waiting = [each for each in state.waiting if each.waits_for != OUTSIDE]
    if not waiting:
        return Answer("valid", "no request waits for the engine")
    for count, what in ((state.running, "running"), (state.in_flight, "in flight"), (state.lookups, "being looked up")):
        if count:
            return Answer("valid", f"{count} {what}")
    if None in (state.running, state.in_flight, state.lookups):
        return Answer("unknown", "the numbers of running requests, transfers and lookups are not known")
    first = next((each for each in waiting if each.waits_for == PLACE), None)
    if first is None:
        what = " or ".join(sorted({each.waits_for for each in waiting}))
        text = f"{_count(len(waiting), 'waits', 'wait')} for a {what}, and none is in flight: no request can move"
        return Answer("violated", text, waiting[0].name)
    if first.needs is None or state.free is None:
        return Answer("unknown", f"it is not known how many blocks {first.name} needs, or how many are free")
    if first.needs <= state.free:
        return Answer("valid", f"{first.name} needs {first.needs} of {state.free} free blocks")
    outside = sum(each.holds for each in state.waiting if each.waits_for == OUTSIDE)
    if first.needs <= state.free + outside:
        return Answer(
            "valid", f"{first.name} needs {first.needs} blocks; requests that wait for clients hold {outside}"
        )
    behind = [each for each in waiting if each is not first]
    loaded = sum(each.waits_for == PLACE and each.holds > 0 for each in behind)
    others = len(behind) - loaded
    waits = _count(others, "waits", "wait")
    if loaded:
        more = f", with {others} more," if others else ""
        waits = f"{_count(loaded, 'is loaded and waits', 'are loaded and wait')}{more}"
    head = f"{waits} behind {first.name}, which needs" if behind else f"{first.name} needs"
    held = sum(each.holds for each in waiting)
    holding = f", waiting requests hold {held}" if held else ""
    blocks = "1 block" if first.needs == 1 else f"{first.needs} blocks"
    text = f"{head} {blocks}; {state.free} are free{holding}: no request can move"
    return Answer("violated", text, first.name)


def _count(number: int, one: str, many: str) -> str:
    return f"1 request {one}" if number == 1 else f"{number} requests {many}"
