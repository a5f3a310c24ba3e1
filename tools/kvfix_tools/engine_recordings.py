"""Combine the recordings of several processes: assign each recording to its engine and rank, and order the events.

The clocks of two machines differ. Two facts bound the difference. A rank begins a load after the scheduler orders the
load. The scheduler learns of the load's end only later. Each worker starts loads and stores in the scheduler's order.
So kvfix matches a worker's events with the scheduler's events without clocks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from kvfix.connector_events.recorder import Entry
from kvfix.ledger import events as ev
from kvfix_tools.ledger import RankDiffers
from kvfix_tools.recording import Recording


class Part(NamedTuple):
    """The recording of one connector in one process."""

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
        """The machine's boot id. Recorded times are from the machine's monotonic clock, which starts at the boot."""
        return str(self.recording.head.get("boot", ""))

    @property
    def mono_at_wall_0(self) -> int:
        """The value in nanoseconds that the monotonic clock has when the wall clock is 0."""
        return int(self.recording.head.get("mono", 0)) - int(self.recording.head.get("wall", 0))

    @property
    def label(self) -> str:
        where = f"pid {self.recording.head['pid']}"
        node = self.recording.head.get("node")
        return f"{'scheduler' if self.is_scheduler else f'rank {self.rank}'}, {where}{f' on {node}' if node else ''}"


class Clock(NamedTuple):
    """ahead: nanoseconds by which a machine's clock is ahead of the scheduler's clock. low, high: bounds of `ahead`."""

    ahead: int
    low: int | None
    high: int | None

    def text(self, other: str) -> str:
        """Return a text with `ahead` and its bounds. other: name of the clock to which `ahead` is relative."""
        low, high = (f"{value / 1e9:+.6f}" if value is not None else "?" for value in (self.low, self.high))
        return f"{self.ahead / 1e9:+.6f} s relative to {other}, between {low} and {high}"

    @classmethod
    def within(cls, ahead: int, lows: list[int], highs: list[int]) -> "Clock":
        """Return a clock. ahead: estimate from wall clocks. If the estimate is out of bounds, use the nearest bound."""
        low, high = max(lows, default=None), min(highs, default=None)
        ahead = ahead if low is None else max(ahead, low)
        return cls(ahead if high is None else min(ahead, high), low, high)


class Compared(NamedTuple):
    """The comparison of a scheduler's recording with a rank's recording."""

    pairs: list[tuple[int, int]]  # for each event in both recordings: (index at the scheduler, index at the rank)
    differs: list[tuple[int, RankDiffers]]  # (scheduler's index of the previous pair, load that only one recording has)
    #: Number of the scheduler's loads that kvfix does not compare: loads before the first pair or after the last pair,
    #: and loads whose request was aborted before the rank started the load. With `enable_fault_tolerance`, vLLM aborts
    #: all requests when a rank fails, and continues (v1/fault_tolerance/engine_core_sentinel.py 0.33.0:90).
    unknown: int


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine's replica with one connector. scheduler: None if not recorded. ranks: number of ranks, 0 if unknown."""

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

    @cached_property
    def compared(self) -> dict[int, Compared]:
        """The comparison of each rank with the scheduler. {} if the scheduler's loads were not recorded."""
        if self.scheduler is None or not self.scheduler.line.get("sees_loads", True):
            return {}
        ordered = [entry.event for entry in self.scheduler.entries]
        started = {rank: [entry.event for entry in part.entries] for rank, part in self.workers.items()}
        return {rank: compare(rank, ordered, events) for rank, events in started.items()}

    @cached_property
    def clocks(self) -> dict[str, Clock]:
        """{boot id: clock of the machine} for every machine except the scheduler's machine."""
        if self.scheduler is None:
            return {}
        boots = dict.fromkeys(part.boot for part in self.parts)
        return {boot: self._clock(boot, self.scheduler) for boot in boots if boot != self.scheduler.boot}

    def _clock(self, boot: str, scheduler: Part) -> Clock:
        highs, lows, ahead = [], [], 0
        for rank, part in [each for each in self.workers.items() if each[1].boot == boot]:
            ahead = part.mono_at_wall_0 - scheduler.mono_at_wall_0
            pairs = self.compared[rank].pairs if rank in self.compared else []
            highs += [part.entries[there].mono - scheduler.entries[here].mono for here, there in pairs]
            lows += _answered(scheduler, part, pairs)
        return Clock.within(ahead, lows, highs)

    def history(self, request: str) -> list[tuple[Part, Entry]]:
        """Return a request's entries of all processes, sorted by time. `mono` is converted to the scheduler's clock."""
        return self._by_request.get(request, [])

    @cached_property
    def _by_request(self) -> dict[str, list[tuple[Part, Entry]]]:
        found: dict[str, list[tuple[Part, Entry]]] = {}
        for part in self.parts:
            clock = self.clocks.get(part.boot)
            ahead = clock.ahead if clock is not None else 0
            for entry in part.entries:
                found.setdefault(entry.event.request, []).append((part, entry._replace(mono=entry.mono - ahead)))
        for entries in found.values():
            entries.sort(key=lambda each: each[1].mono)  # at equal times the scheduler's entries stay first
        return found


def engines(recordings: Iterable[Recording]) -> list[Engine]:
    found: dict[tuple[str, str, int], list[Part]] = {}
    for recording in processes(recordings):
        counts: dict[tuple[str, str], int] = {}
        for number, line in recording.connectors.items():
            role = line.get("role")
            if not role:  # this line is about vLLM's scheduler, not about a connector
                continue
            # nth: a MultiConnector may have two connectors of one class. role: on one GPU, both roles share a process.
            counts[line["name"], role] = nth = counts.get((line["name"], role), -1) + 1
            name = f"{line.get('engine', '?')}.{line.get('replica', 0)}"
            entries = [entry for entry in recording.entries if entry.connector == number]
            found.setdefault((name, line["name"], nth), []).append(Part(recording, line, entries))
    return [_engine(name, connector, parts) for (name, connector, _), parts in found.items()]


def _engine(name: str, connector: str, parts: list[Part]) -> Engine:
    """Return the engine with these parts. Raise ValueError if two processes claim the same rank."""
    schedulers = [part for part in parts if part.is_scheduler]
    workers = {part.rank: part for part in parts if not part.is_scheduler}
    if len(schedulers) > 1 or len(workers) + len(schedulers) != len(parts):
        names = ", ".join(part.recording.path for part in parts)
        same = f"two recordings are of the same rank of {connector}"
        raise ValueError(f"{same}: {names}. Give kvfix the recordings of one engine at a time")
    ranks = max((int(part.line.get("ranks", 0)) for part in parts), default=0)
    return Engine(name, connector, schedulers[0] if schedulers else None, workers, ranks)


def processes(recordings: Iterable[Recording]) -> list[Recording]:
    """Merge the files of each process into one recording. Each file has the last events before kvfix wrote the file."""
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
        merged.append(last._replace(lines=lines, entries=sorted(entries, key=lambda entry: entry.mono)))
    return merged


def _answered(scheduler: Part, worker: Part, pairs: list[tuple[int, int]]) -> list[int]:
    """Return lower bounds of `Clock.ahead`. Loads of a request that is not aborted begin before the request ends."""
    bounds, ended = [], dict[str, list[int]]()
    for at, entry in enumerate(scheduler.entries):
        if isinstance(entry.event, ev.Finished) and not entry.event.aborted:
            ended.setdefault(entry.event.request, []).append(at)
    for here, there in pairs:
        event = scheduler.entries[here].event
        end = next((at for at in ended.get(event.request, ()) if at > here), None)
        if end is not None and isinstance(event, ev.LoadDue):
            bounds.append(worker.entries[there].mono - scheduler.entries[end].mono)
    return bounds


def compare(rank: int, scheduler: Sequence[ev.Event], worker: Sequence[ev.Event]) -> Compared:
    """Compare the loads and stores that the scheduler and the rank have recorded, in the recorded order."""
    due = [(at, event) for at, event in enumerate(scheduler) if isinstance(event, ev.LoadDue | ev.Stored)]
    started = [(at, event) for at, event in enumerate(worker) if isinstance(event, ev.LoadDue | ev.Stored)]
    anchors = _anchors([_key(event) for _, event in due], [_key(event) for _, event in started])
    pairs = [(due[one][0], started[other][0]) for one, other in anchors]
    differs: list[tuple[int, RankDiffers]] = []
    unknown = 0
    for (one, other), (next_one, next_other) in pairwise(anchors):
        scheduled = Counter(event for _, event in due[one + 1 : next_one] if isinstance(event, ev.LoadDue))
        loaded = Counter(event for _, event in started[other + 1 : next_other] if isinstance(event, ev.LoadDue))
        ends = [event for event in scheduler[due[one][0] : due[next_one][0]] if isinstance(event, ev.Finished)]
        aborted = {event.request for event in ends if event.aborted}
        missing = list((scheduled - loaded).elements())
        unknown += sum(event.request in aborted for event in missing)
        missing = [event for event in missing if event.request not in aborted]
        for found, is_scheduled in ((missing, True), ((loaded - scheduled).elements(), False)):
            loads = (RankDiffers(each.request, rank, each.start, each.end, is_scheduled) for each in found)
            differs += [(due[one][0], load) for load in loads]
    first, last = (anchors[0][0], anchors[-1][0]) if anchors else (len(due), -1)
    outside = [event for at, (_, event) in enumerate(due) if not first <= at <= last]
    return Compared(pairs, differs, unknown + sum(isinstance(event, ev.LoadDue) for event in outside))


def _key(event: ev.LoadDue | ev.Stored) -> tuple[str, ...]:
    """Return the fields that both recordings have. Only the scheduler records a store's field `covered`."""
    return (type(event).__name__, *map(str, event[:3]))


def _anchors(due: list[tuple[str, ...]], started: list[tuple[str, ...]]) -> list[tuple[int, int]]:
    """Return index pairs of equal events. Return [] if the orders differ, as in recordings of different engines."""
    once = {key for key, count in Counter(due).items() if count == 1}
    once &= {key for key, count in Counter(started).items() if count == 1}
    places = {key: at for at, key in enumerate(started)}
    sure = [(at, places[key]) for at, key in enumerate(due) if key in once]
    if any(other >= next_other for (_, other), (_, next_other) in pairwise(sure)):
        return []
    found = set(sure)
    for one, other in sure:
        for step in (-1, 1):
            here, there = one + step, other + step
            while 0 <= here < len(due) and 0 <= there < len(started) and due[here] == started[there]:
                if (here, there) in found:
                    break
                found.add((here, there))
                here, there = here + step, there + step
    # Two pairs may contradict each other, for example if one recording lacks one of two equal loads.
    ones, others = (Counter(pair[side] for pair in found) for side in (0, 1))
    kept = [(one, other) for one, other in sorted(found) if ones[one] == others[other] == 1]
    return kept if all(a[1] < b[1] for a, b in pairwise(kept)) else []
