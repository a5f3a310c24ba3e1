"""Read from an engine's state (`kvfix.engine_state`) what requests wait for, and whether a request can move on.

vLLM tries to admit its waiting requests in order, and stops at the first request that needs more blocks than are free
(`break` after `allocate_slots` in `schedule`, v1/core/sched/scheduler.py 0.32.0:1275-1282). The blocked
request waits for a step, a transfer or a lookup to end. If nothing is in flight, the request waits for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfix.engine_state.scheduler import QUEUES

#: A request waits for free blocks (PLACE), for its load, for its lookup, or for an event outside the engine (OUTSIDE).
PLACE, LOAD, LOOKUP, OUTSIDE = "place", "load", "lookup", "outside"
#: The keys are statuses that vLLM gives to a request. The values name what the request waits for outside the engine.
OUTSIDE_STATUSES = {
    "WAITING_FOR_STREAMING_REQ": "the client: the next part of its prompt",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "the compiler of its grammar",
}
#: Fields of a worker's row: requests with unreported loads, and ended requests with unreported stores.
KINDS = ("loads", "unreported")


@dataclass(frozen=True)
class Waiting:
    """A waiting request."""

    name: str
    waits_for: str = PLACE
    #: Free blocks needed to admit the request. A load between steps also needs vLLM's reserved blocks. None: not known.
    needs: int | None = None
    #: Blocks that the request already has, for example after its load has ended.
    holds: int = 0


@dataclass(frozen=True)
class State:
    """The state of an engine between two steps. An unknown number is None."""

    #: The waiting requests, in the order in which the scheduler admits them.
    waiting: tuple[Waiting, ...]
    #: Free blocks, including blocks with a cached prefix.
    free: int | None
    running: int | None
    #: Number of transfers and steps in flight, plus the number of blocks that vLLM frees after a later step.
    in_flight: int | None
    lookups: int | None


class Answer(NamedTuple):
    """The result of `can_move`. message: the verdict's reason. request: the first request that cannot move, or ""."""

    verdict: str
    message: str
    request: str = ""


def can_move(state: State) -> Answer:
    """Return "valid" if a waiting request can still move, "violated" if none can, "unknown" if data is missing."""
    waiting = [each for each in state.waiting if each.waits_for != OUTSIDE]
    if not waiting:
        return Answer("valid", "no request waits for the engine")
    for count, what in (
        (state.running, "running requests"),
        (state.in_flight, "transfers and steps in flight"),
        (state.lookups, "open lookups"),
    ):
        if count:
            return Answer("valid", f"the number of {what} is {count}")
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
    theirs = sum(each.holds for each in state.waiting if each.waits_for == OUTSIDE)
    if first.needs <= state.free + theirs:
        return Answer("valid", f"{first.name} needs {first.needs} blocks, and other requests may free {theirs} blocks")
    behind = [each for each in waiting if each is not first]
    loaded = sum(each.waits_for == PLACE and each.holds > 0 for each in behind)
    others = len(behind) - loaded
    waits = _count(others, "waits", "wait")
    if loaded:
        both = f"{loaded} loaded and {others} other requests wait"
        waits = both if others else _count(loaded, "is loaded and waits", "are loaded and wait")
    head = f"{waits} behind {first.name}, which needs" if behind else f"{first.name} needs"
    held = sum(each.holds for each in waiting)
    holding = f", waiting requests hold {held}" if held else ""
    blocks = "1 block" if first.needs == 1 else f"{first.needs} blocks"
    text = f"{head} {blocks}; {state.free} are free{holding}: no request can move"
    return Answer("violated", text, first.name)


def _count(number: int, one: str, many: str) -> str:
    return f"1 request {one}" if number == 1 else f"{number} requests {many}"


@dataclass(frozen=True)
class Engine:
    """One engine. `process` is the state of the process that runs the scheduler."""

    process: dict[str, Any]
    #: (state of a worker's process, row of the worker's connector), ordered by rank.
    workers: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @property
    def scheduler(self) -> Any:
        return self.process["scheduler"]

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [row for row in self.scheduler["requests"] if "unread" not in row]

    @property
    def connectors(self) -> list[dict[str, Any]]:
        return [each for each in self.process.get("connectors") or () if each["role"] != "WORKER"]

    @property
    def ranks(self) -> int:
        return max((each["ranks"] or 1 for each in self.connectors), default=1)

    @property
    def sees_transfers(self) -> bool:
        """True if kvfix knows the transfers in flight of every rank."""
        known = [each for _, each in self.workers if "loads" in each and "unread" not in each]
        return len({each["rank"] for each in known}) >= self.ranks

    def ranks_with(self, request: str, *kinds: str) -> list[int]:
        """Return the ranks whose connector lists the request in one of the fields `kinds`, such as "loads"."""
        return sorted({each["rank"] or 0 for _, each in self.workers if any(request in each.get(k, ()) for k in kinds)})


def engines(processes: Iterable[dict[str, Any]]) -> list[Engine]:
    processes = [each for each in processes if "schema" in each]
    connectors = [(process, each) for process in processes for each in process.get("connectors") or ()]
    workers = [pair for pair in connectors if pair[1]["role"] == "WORKER"]
    found = []
    for process in processes:
        if process.get("scheduler"):
            names = {each["engine"] for each in process.get("connectors") or () if each["role"] != "WORKER"}
            own = [pair for pair in workers if pair[1]["engine"] in names]
            found.append(Engine(process, tuple(sorted(own, key=lambda pair: pair[1]["rank"] or 0))))
    return found


def waiting(engine: Engine) -> list[dict[str, Any]]:
    """Return the rows of the waiting requests, in the order in which vLLM admits them."""
    return [row for row in engine.requests if row["queue"] in QUEUES]


def waits(engine: Engine) -> list[tuple[dict[str, Any], str]]:
    """Return (row, kind of wait) per waiting request. Behind a request that lacks blocks, a lookup counts as PLACE."""
    found: list[tuple[dict[str, Any], str]] = []
    stopped, free = False, engine.scheduler["pool"]["free"]
    for row in waiting(engine):
        kind = PLACE
        if row["status"] in OUTSIDE_STATUSES:
            kind = OUTSIDE
        elif row["status"] == "WAITING_FOR_REMOTE_KVS" and not row["report"]:
            kind = LOAD
        elif row["lookup"] == "in flight" and not row["computed"] and not stopped:
            kind = LOOKUP
        stopped = stopped or (kind == PLACE and row["needs"] is not None and row["needs"] > free)
        found.append((row, kind))
    return found


def state(engine: Engine) -> State:
    """Return the state for `can_move`. Each lookup counts as in flight. standstill.py finds unanswered lookups."""
    scheduler = engine.scheduler
    rows = tuple(Waiting(row["id"], kind, row["needs"], row["blocks"]) for row, kind in waits(engine))
    running = sum(row["queue"] in ("running", "") for row in engine.requests)
    in_flight = (scheduler["answers"] or 0) + scheduler["deferred"]
    for _, each in engine.workers:
        in_flight += sum(len(each.get(kind, ())) for kind in ("stores", *KINDS))
    # If no request runs, only requests that wait for a load or have ended can have a transfer in flight.
    kept = any(row["queue"] == "ended" for row in engine.requests) or any(each.waits_for == LOAD for each in rows)
    unknown = kept and not engine.sees_transfers and bool(engine.connectors)
    lookups = sum(each.waits_for == LOOKUP for each in rows)
    return State(rows, scheduler["pool"]["free"], running, None if unknown and not in_flight else in_flight, lookups)


def ranks_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
