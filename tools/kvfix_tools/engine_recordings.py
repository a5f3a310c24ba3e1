"""Recordings of several processes, nodes and ranks as one: which engine each is of, what rank, and in what order.

Processes of one machine have one monotonic clock. Between machines only wall clocks could be compared, and they differ:
a rank begins a load after the scheduler has ordered it, and before the scheduler hears of its end, which bounds how
much (`Clock`). A rank without a recording is missing, and what it did is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kvfix.connector_events.recorder import Entry
from kvfix.ledger import events as ev
from kvfix_tools.ledger.ranks import Compared, compare
from kvfix_tools.recording import Recording


class Part(NamedTuple):
    """One connector in one process."""

    recording: Recording
    line: dict[str, Any]
    entries: list[Entry]

    @property
    def rank(self) -> int:
        return int(self.line.get("rank", 0))

    @property
    def is_scheduler(self) -> bool:
        return bool(self.line.get("role") == "SCHEDULER")

    @property
    def boot(self) -> str:
        """Whose monotonic clock its times are."""
        return str(self.recording.head.get("boot", ""))

    @property
    def label(self) -> str:
        where = f"pid {self.recording.head['pid']}"
        node = self.recording.head.get("node")
        return f"{'scheduler' if self.is_scheduler else f'rank {self.rank}'}, {where}{f' on {node}' if node else ''}"


class Clock(NamedTuple):
    """Nanoseconds that a machine's monotonic clock is ahead of the scheduler's: by their wall clocks, brought
    between what the events allow. low, high: None where nothing bounds it.
    """

    ahead: int
    low: int | None
    high: int | None

    @classmethod
    def within(cls, ahead: int, lows: list[int], highs: list[int]) -> Clock:
        """By the wall clocks `ahead`, brought between these bounds."""
        low, high = max(lows, default=None), min(highs, default=None)
        ahead = ahead if low is None else max(ahead, low)
        return cls(ahead if high is None else min(ahead, high), low, high)


class Engine(NamedTuple):
    """One connector of one replica of an engine. `scheduler` None: its recording is not here.

    workers: by rank. ranks: how many there are; 0: not on record.
    """

    name: str
    connector: str
    scheduler: Part | None
    workers: dict[int, Part]
    ranks: int

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.workers]

    @property
    def parts(self) -> list[Part]:
        return ([self.scheduler] if self.scheduler else []) + [self.workers[rank] for rank in sorted(self.workers)]

    def compared(self) -> dict[int, Compared]:
        """Each rank against the scheduler. Empty where the scheduler is missing, or loads are not on record."""
        if self.scheduler is None or not self.scheduler.line.get("sees_loads", True):
            return {}
        ordered = [entry.event for entry in self.scheduler.entries]
        return {
            rank: compare(rank, ordered, [entry.event for entry in part.entries]) for rank, part in self.workers.items()
        }

    def clocks(self) -> dict[str, Clock]:
        """{boot: its clock} of every machine but the scheduler's own."""
        if self.scheduler is None:
            return {}
        compared = self.compared()
        boots = dict.fromkeys(part.boot for part in self.parts)
        return {boot: self._clock(boot, compared) for boot in boots if boot != self.scheduler.boot}

    def _clock(self, boot: str, compared: dict[int, Compared]) -> Clock:
        assert self.scheduler is not None
        highs, lows, ahead = [], [], 0
        for rank, part in self.workers.items():
            if part.boot != boot:
                continue
            ahead = _mono_at_same_wall(part) - _mono_at_same_wall(self.scheduler)
            pairs = compared[rank].pairs if rank in compared else []
            highs += [part.entries[there].mono - self.scheduler.entries[here].mono for here, there in pairs]
            lows += _answered(self.scheduler, part, pairs)
        return Clock.within(ahead, lows, highs)

    def history(self, request: str) -> list[tuple[Part, Entry]]:
        """A request's entries of all parts, in order; `mono` is by the scheduler's clock."""
        return self.by_request().get(request, [])

    def by_request(self) -> dict[str, list[tuple[Part, Entry]]]:
        """The same of every request on record."""
        clocks = self.clocks()
        found: dict[str, list[tuple[Part, Entry]]] = {}
        for part in self.parts:
            clock = clocks.get(part.boot)
            ahead = clock.ahead if clock is not None else 0
            for entry in part.entries:
                found.setdefault(entry.event.request, []).append((part, entry._replace(mono=entry.mono - ahead)))
        for entries in found.values():
            entries.sort(key=lambda each: each[1].mono)  # the scheduler's are first where it is the same
        return found


def engines(recordings: Iterable[Recording]) -> list[Engine]:
    """Every connector of every engine that is on record."""
    found: dict[tuple[str, str, int], list[Part]] = {}
    for recording in processes(recordings):
        counts: dict[tuple[str, str], int] = {}
        for number, line in recording.connectors.items():
            role = line.get("role")
            if not role:  # the scheduler itself
                continue
            # A MultiConnector may have two of a kind. On one GPU both roles are in one process.
            counts[line["name"], role] = nth = counts.get((line["name"], role), -1) + 1
            name = f"{line.get('engine', '?')}.{line.get('replica', 0)}"
            entries = [entry for entry in recording.entries if entry.connector == number]
            found.setdefault((name, line["name"], nth), []).append(Part(recording, line, entries))
    return [_engine(name, connector, parts) for (name, connector, _), parts in found.items()]


def _engine(name: str, connector: str, parts: list[Part]) -> Engine:
    """Raises ValueError where two processes are the same rank by their records: then they are of two engines."""
    schedulers = [part for part in parts if part.is_scheduler]
    workers = {part.rank: part for part in parts if not part.is_scheduler}
    if len(schedulers) > 1 or len(workers) + len(schedulers) != len(parts):
        names = ", ".join(part.recording.path for part in parts)
        raise ValueError(f"two of them are the same rank of {connector}, so they are not of one engine: {names}")
    ranks = max((int(part.line.get("ranks", 0)) for part in parts), default=0)
    return Engine(name, connector, schedulers[0] if schedulers else None, workers, ranks)


def processes(recordings: Iterable[Recording]) -> list[Recording]:
    """One recording for each process, of all that it has written: each file holds the last events of its time."""
    by_process: dict[tuple[str, str, int, int], list[Recording]] = {}
    for recording in recordings:
        by_process.setdefault(recording.process, []).append(recording)
    merged = []
    for several in by_process.values():
        several.sort(key=lambda each: int(each.head.get("mono", 0)))
        last = several[-1]
        entries = dict.fromkeys(entry for each in several for entry in each.entries)
        connectors = {number: line for each in several for number, line in each.connectors.items()}
        lines = {**last.lines, "connector": list(connectors.values())}
        ordered = sorted(entries, key=lambda entry: entry.mono)
        merged.append(last._replace(lines=lines, entries=ordered))
    return merged


def _mono_at_same_wall(part: Part) -> int:
    """The monotonic clock when the wall clock was 0."""
    head = part.recording.head
    return int(head.get("mono", 0)) - int(head.get("wall", 0))


def _answered(scheduler: Part, worker: Part, pairs: list[tuple[int, int]]) -> list[int]:
    """A request has not ended by itself before each rank has begun the load that it was admitted with."""
    bounds, ended = [], _ends(scheduler)
    for here, there in pairs:
        event = scheduler.entries[here].event
        end = next((at for at in ended.get(event.request, ()) if at > here), None)
        if end is not None and isinstance(event, ev.LoadDue):
            bounds.append(worker.entries[there].mono - scheduler.entries[end].mono)
    return bounds


def _ends(scheduler: Part) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for at, entry in enumerate(scheduler.entries):
        if isinstance(entry.event, ev.Finished) and not entry.event.aborted:
            found.setdefault(entry.event.request, []).append(at)
    return found
