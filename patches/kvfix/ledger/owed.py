"""Find the engines in states of `kvfix.engine_state`, and what their requests wait for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import liveness
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE

#: {status of vLLM in which a request waits for something outside of the engine: what it waits for}
OUTSIDE_STATUSES = {
    "WAITING_FOR_STREAMING_REQ": "the client: the next part of its prompt",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "the compiler of its grammar",
}
#: Fields of a worker's connector with loads that it has not reported.
KINDS = ("loads", "unreported")


@dataclass(frozen=True)
class Engine:
    """A scheduler, and the workers' connectors that belong to it. `process` has the scheduler's state."""

    process: dict[str, Any]
    #: (state of the process, state of its connector), in the order of their ranks.
    workers: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @property
    def scheduler(self) -> dict[str, Any]:
        found: dict[str, Any] = self.process["scheduler"]
        return found

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
        """True if every rank was read, and kvfix can read the transfers of its connector."""
        known = [each for _, each in self.workers if "loads" in each and "unread" not in each]
        return len({each["rank"] for each in known}) >= self.ranks

    def ranks_with(self, request: str, *kinds: str) -> list[int]:
        """Return the ranks that have the request in one of these fields: "loads", "stores", "unreported"."""
        return sorted({each["rank"] or 0 for _, each in self.workers if any(request in each.get(k, ()) for k in kinds)})


def engines(processes: Iterable[dict[str, Any]]) -> list[Engine]:
    """Return one engine for each scheduler in these processes."""
    processes = [each for each in processes if "schema" in each]
    workers = [
        (process, connector)
        for process in processes
        for connector in process.get("connectors") or ()
        if connector["role"] == "WORKER"
    ]
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
    """Return (row, what it waits for) of the waiting requests.

    vLLM stops at the first request that it has no blocks for. It does not read the lookup results of later requests, so
    these wait for blocks too.
    """
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


def state(engine: Engine) -> liveness.State:
    """Return the state for `liveness.can_move`. Lookups count as in flight: another rule finds unanswered ones."""
    scheduler = engine.scheduler
    rows = tuple(liveness.Waiting(row["id"], kind, row["needs"], row["blocks"]) for row, kind in waits(engine))
    running = sum(row["queue"] in ("running", "") for row in engine.requests)
    in_flight = scheduler["answers"] or 0
    in_flight += scheduler["deferred"]
    for _, each in engine.workers:
        in_flight += sum(len(each.get(kind, ())) for kind in ("stores", *KINDS))
    # A request in a transfer is in the scheduler too: it waits for its load, or it has ended.
    kept = any(row["queue"] == "ended" for row in engine.requests) or any(each.waits_for == LOAD for each in rows)
    unknown = kept and not engine.sees_transfers and bool(engine.connectors)
    lookups = sum(each.waits_for == LOOKUP for each in rows)
    free = scheduler["pool"]["free"]
    return liveness.State(rows, free, running, None if unknown and not in_flight else in_flight, lookups)


def ranks_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
