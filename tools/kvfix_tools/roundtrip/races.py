"""What a transfer must wait for, with the waiting and, as the negative control, without.

A race is a few lanes of work and the events between them. On a GPU a lane is a stream, and a slow one sleeps on the
device. On the CPU it is a stand-in, a queue of deferred work: nothing runs until all has been submitted, then a slow
lane runs only when no other can go on. So an event that is missing is seen every time, and never by chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.backends.torch_copy import HOST, TorchCopy
from kvfix_tools.roundtrip.cell import Cell
from kvfix_tools.roundtrip.element import FIRST, OTHER, POISON, STALE, Identity
from kvfix_tools.roundtrip.inject import everything
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region
from kvfix_tools.roundtrip.trip import Result, Trip, everywhere

#: Clock cycles that a slow stream sleeps: tens of milliseconds, longer than what it races with.
SLEEP = 50_000_000
Work = Callable[[], Any]


@dataclass
class Event:
    """`native`: of CUDA. `done`: of the stand-in."""

    native: Any = None
    done: bool = False


class StreamLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device, slow: bool) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.kept: list[Work] = []  # and so the tensors in it: they must live until the device has read them
        if slow:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(SLEEP)

    def submit(self, work: Work, host: bool = False) -> None:
        """host: it is the host that does it, at once; it waits for what the stream waits for."""
        if host:
            self.stream.synchronize()
            work()
            return
        self.kept.append(work)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # where its operands were made
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        return Event(self.stream.record_event())

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event.native)


@dataclass
class DeferredLane:
    """The stand-in on the CPU."""

    slow: bool
    queue: deque[Work | Event] = field(default_factory=deque)

    def submit(self, work: Work, host: bool = False) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.queue.append(lambda: setattr(event, "done", True))
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event)

    def step(self) -> bool:
        """Do what is next; False if there is nothing, or it has to wait."""
        while self.queue and isinstance(self.queue[0], Event) and self.queue[0].done:
            self.queue.popleft()
        if not self.queue or isinstance(self.queue[0], Event):
            return False
        self.queue.popleft()()  # type: ignore[operator]
        return True


class Lanes:
    """The lanes of one race. `events`: whether they wait for one another."""

    def __init__(self, device: torch.device, events: bool) -> None:
        self.device, self.events = device, events
        self.lanes: list[Any] = []

    def lane(self, slow: bool = False) -> Any:
        lane = StreamLane(self.device, slow) if self.device.type == "cuda" else DeferredLane(slow)
        self.lanes.append(lane)
        return lane

    def after(self, lane: Any, earlier: Any) -> None:
        """What `lane` does from here on comes after what `earlier` has so far: the event that a race turns on."""
        event = earlier.record()
        if self.events:
            lane.wait(event)

    def finish(self, until: Any = None) -> None:
        """Everything; or until nothing is left to do in this lane."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return
        order = sorted(self.lanes, key=lambda lane: lane.slow)
        while (until is None or until.queue) and any(lane.step() for lane in order):
            pass
        asked = self.lanes if until is None else [until]
        if any(lane.queue for lane in asked):
            raise RuntimeError("lanes that wait for one another")


class Race(Trip):
    """A cell whose transfer runs beside other work: the torch backend's."""

    def __init__(self, cell: Cell, device: torch.device, events: bool) -> None:
        super().__init__(cell, device)
        self.lanes = Lanes(device, events)
        self.result.operations = "streams" if device.type == "cuda" else "streams by a stand-in: deferred, in order"
        self.copy: Any = self.copier()
        self.host: Region = self.copy.host
        self.cache.fill(everywhere(STALE))
        self.host.fill(self.poison(self.host))

    def copier(self) -> Any:
        return TorchCopy(self)

    def ended(self) -> Result:
        self.result.verdict = "failed" if self.result.findings else "passed"
        self.result.verified = self.cache.verified + self.host.verified
        return self.result

    def store(self, lane: Any, copy: TorchCopy | None = None, slots: torch.Tensor | None = None) -> None:
        self._each(lane, copy or self.copy, self.source if slots is None else slots, TorchCopy.gather)

    def load(self, lane: Any, copy: TorchCopy | None = None, slots: torch.Tensor | None = None) -> None:
        def scatter(one: TorchCopy, buffer: torch.Tensor, part: torch.Tensor, staging: torch.Tensor) -> None:
            one.scatter(buffer, part, staging, 0)

        self._each(lane, copy or self.copy, self.target if slots is None else slots, scatter)

    def write(
        self, lane: Any, region: Region, expected: Expected, where: Callable[[Coordinates], torch.Tensor]
    ) -> None:
        """Other work: those rows of the region take that content, tensor by tensor."""
        at, first = everything(region), 0
        image = regions.Region(region.words.clone(), region.sections, self.geometry, self.device, self.cell.seed, "")
        image.fill(expected, guards=False)
        for into, content in zip(region.tensors(), image.tensors(), strict=True):
            part = {name: values[first : first + len(into)] for name, values in at.items()}
            chosen = where(part).nonzero()[:, 0]
            work = partial(into.index_copy_, 0, chosen, content[chosen])
            lane.submit(work, host=into.device.type != self.device.type)
            first += len(into)

    def mapped(self, slots: torch.Tensor) -> Callable[[Coordinates], torch.Tensor]:
        return lambda at: torch.isin(at["slot"], slots)

    def _each(self, lane: Any, copy: TorchCopy, slots: torch.Tensor, move: Any) -> None:
        for buffer, part in zip(copy.buffers, slots.split(copy.chunk), strict=True):
            lane.submit(partial(move, copy, buffer, part, copy.staging[0]))


def late_producer(race: Race) -> None:
    """The kernel that writes the KV is still to run when the store is submitted."""
    producer, copier = race.lanes.lane(slow=True), race.lanes.lane()
    race.write(producer, race.cache, everywhere(FIRST), race.mapped(race.source))
    race.lanes.after(copier, producer)
    race.store(copier)
    race.lanes.finish()
    race.check("store after a late producer", race.host, race.tokens(FIRST))


def early_reuse(race: Race) -> None:
    """The blocks of a request are given to another one, which writes to them, while they are being stored."""
    race.cache.fill(everywhere(FIRST))
    copier, other = race.lanes.lane(slow=True), race.lanes.lane()
    race.store(copier)
    race.lanes.after(other, copier)
    race.write(other, race.cache, everywhere(OTHER), race.mapped(race.source))
    race.lanes.finish()
    race.check("store of blocks that are used again", race.host, race.tokens(FIRST))


def neighbours(race: Race) -> None:
    """Another stream writes to all other slots, of the same blocks too, while a store and a load run. No event is
    needed but between the store and its load."""
    race.cache.fill(everywhere(FIRST))
    copier, hostile, loader = race.lanes.lane(slow=True), race.lanes.lane(), race.lanes.lane()
    both = torch.cat([race.source, race.target])
    race.store(copier)
    race.write(hostile, race.cache, everywhere(OTHER), lambda at: ~torch.isin(at["slot"], both))
    race.lanes.after(loader, copier)
    race.load(loader)
    race.lanes.finish()
    loaded = race.loaded(FIRST, 0)

    def expected(at: Coordinates) -> Identity:
        who, source = loaded(at), torch.isin(at["slot"], race.source)
        generation = torch.where(who.generation == POISON, torch.where(source, FIRST, OTHER), who.generation)
        return who._replace(generation=generation)

    race.check("load beside writes to its neighbours", race.cache, expected)


def many_in_flight(race: Race) -> None:
    """Four stores and their loads at once, each with its own part of the slots and host buffers of its own."""
    race.cache.fill(everywhere(FIRST))
    hosts: list[tuple[Region, torch.Tensor]] = []
    for source, target in zip(race.source.chunk(4), race.target.chunk(4), strict=False):
        copy = TorchCopy(race)
        copy.host = regions.host(race.geometry, HOST, copy.chunk, len(source), race.device, race.cell.seed)
        copy.host.fill(race.poison(copy.host))
        copy.buffers = [rows.view(race.geometry.layers, -1, *copy.layers[0].shape[2:]) for rows in copy.host.tensors()]
        storing, loading = race.lanes.lane(slow=True), race.lanes.lane()
        race.store(storing, copy, source)
        race.lanes.after(loading, storing)
        race.load(loading, copy, target)
        hosts.append((copy.host, source))
    race.lanes.finish()
    loaded = race.loaded(FIRST, 0)
    race.check(
        "many in flight", race.cache, lambda at: loaded(at)._replace(generation=torch.full_like(at["slot"], FIRST))
    )


def buffer_taken_again(race: Race) -> None:
    """Host buffers are handed back while a load still reads them, and the next store takes them."""
    race.cache.fill(everywhere(POISON))
    race.host.fill(race.tokens(FIRST))
    loader, other = race.lanes.lane(slow=True), race.lanes.lane()
    race.load(loader)
    race.lanes.after(other, loader)
    race.write(other, race.host, race.tokens(OTHER), lambda at: at["token"] >= 0)
    race.lanes.finish()
    race.check("load from a buffer that is taken again", race.cache, race.loaded(FIRST, 0))


RACES: dict[str, Callable[[Race], None]] = {
    "late-producer": late_producer,
    "early-reuse": early_reuse,
    "neighbours": neighbours,
    "many-in-flight": many_in_flight,
    "buffer-taken-again": buffer_taken_again,
}


def of(backend: str) -> tuple[str, ...]:
    """The races of a backend. LMCache's connectors have no more than one transfer each in flight."""
    if backend == "torch":
        return tuple(RACES)
    return tuple(name for name in RACES if name != "many-in-flight") if backend in ("lmcache-v2", "lmcache-v3") else ()


def run(name: str, cell: Cell, device: torch.device, events: bool = True) -> Result:
    """One race. events: False takes out what the lanes wait for."""
    if cell.backend == "torch":
        race = Race(cell, device, events)
    else:
        from kvfix_tools.roundtrip.races_lmcache import ConnectorRace  # imports LMCache

        race = ConnectorRace(cell, device, events)
    race.result.race = name
    RACES[name](race)
    return race.ended()
