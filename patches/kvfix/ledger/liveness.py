"""Whether the waiting requests of an engine can move. Pure: a state in, an answer out; it imports no engine.

vLLM asks its waiting requests in order and stops at the first one that it has no blocks for (`schedule`, the `break`
after `allocate_slots`; v1/core/sched/scheduler.py 0.32.0:1275-1282). That one waits until something ends: a step of a
running request, a transfer, a lookup. If nothing runs, is in flight or is owed, nothing ever ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: What a waiting request waits for: a place in a step (blocks), its load, an answer to its lookup; or something that no
#: part of the engine owes: the next part of a streamed prompt, a grammar.
PLACE, LOAD, LOOKUP, OUTSIDE = "place", "load", "lookup", "outside"


@dataclass(frozen=True)
class Waiting:
    """needs: free blocks without which vLLM does not admit it, with those that it keeps for others; None: unknown.
    holds: blocks it has already, as a request does whose load is done."""

    name: str
    waits_for: str = PLACE
    needs: int | None = None
    holds: int = 0


@dataclass(frozen=True)
class State:
    """Between two steps. None: the source does not know it."""

    #: In the order in which the scheduler asks.
    waiting: tuple[Waiting, ...]
    #: Free blocks, those that hold a cached prefix among them.
    free: int | None
    #: Requests that run.
    running: int | None
    #: Loads and stores whose end is not reported yet, and reports that the scheduler has not used yet.
    in_flight: int | None
    #: Lookups that will be answered.
    lookups: int | None


class Answer(NamedTuple):
    """verdict: valid, violated or unknown. message: the arithmetic. request: the first one that cannot move."""

    verdict: str
    message: str
    request: str = ""


def can_move(state: State) -> Answer:
    """Whether any of the waiting requests can still move."""
    waiting = [each for each in state.waiting if each.waits_for != OUTSIDE]
    if not waiting:
        return Answer("valid", "no request waits for the engine")
    for count, what in ((state.running, "running"), (state.in_flight, "in flight"), (state.lookups, "being looked up")):
        if count:
            return Answer("valid", f"{count} {what}")
    if None in (state.running, state.in_flight, state.lookups):
        return Answer("unknown", "whether anything runs, is in flight or is looked up is not known")
    first = next((each for each in waiting if each.waits_for == PLACE), None)
    if first is None:
        what = " or ".join(sorted({each.waits_for for each in waiting}))
        text = f"{_count(len(waiting), 'waits', 'wait')} for a {what}, and none is in flight: no request can move"
        return Answer("violated", text, waiting[0].name)
    if first.needs is None or state.free is None:
        return Answer("unknown", f"how many blocks {first.name} needs, and how many are free, is not known")
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
        beside = f", with {others} more," if others else ""
        waits = f"{_count(loaded, 'is loaded and waits', 'are loaded and wait')}{beside}"
    head = f"{waits} behind {first.name}, which needs" if behind else f"{first.name} needs"
    held = sum(each.holds for each in waiting)
    holding = f", those that wait hold {held}" if held else ""
    text = f"{head} {_blocks(first.needs)}; {state.free} can be had{holding}: no request can move"
    return Answer("violated", text, first.name)


def _count(number: int, one: str, many: str) -> str:
    return f"1 request {one}" if number == 1 else f"{number} requests {many}"


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"
