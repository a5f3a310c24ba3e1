"""Run a transfer during other work. CUDA events order transfer and work, unless a planted fault removes the events."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any
from unittest import mock

import torch

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import lmcache
from kvfix_tools.roundtrip.backends.torch_copy import CudaStream, TorchCopy, Work
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Result, everywhere, host_poison
from kvfix_tools.roundtrip.element import FIRST, OTHER, POISON, STALE, Identity, rows
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region


@dataclass
class DeferredStream:
    """A queue in place of a CUDA stream. `Race.finish` runs work of slow streams only if no fast stream can run."""

    slow: bool
    queue: deque[Work] = field(default_factory=deque)

    def submit(self, work: Work, host: bool = False) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.queue.append(event.set)
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event.is_set)

    def step(self) -> bool:
        """Do the next work in the queue. Return False if the queue is empty, or if the work must wait for an event."""
        if not self.queue or self.queue[0]() is False:
            return False
        self.queue.popleft()
        return True


class Race(CellCheck):
    """Check one cell (a test case). Other work runs while the backend `torch` stores and loads the cell's KV."""

    def __init__(self, cell: Cell, device: torch.device, events: bool, result: Result | None) -> None:
        super().__init__(cell, device, result)
        self.events, self.streams = events, list[Any]()
        self.result.operations = "streams" if device.type == "cuda" else "queues in place of CUDA streams"
        self.copy = self.transfer()
        self.prepare(self.copy)
        self.cache.fill(everywhere(STALE))

    def transfer(self) -> Any:
        return TorchCopy(self)

    def stream(self, slow: bool = False) -> Any:
        stream = CudaStream(self.device, slow) if self.device.type == "cuda" else DeferredStream(slow)
        self.streams.append(stream)
        return stream

    def after(self, stream: Any, earlier: Any) -> None:
        """If the race has events, make later work of `stream` wait for all queued work of `earlier`."""
        event = earlier.record()
        if self.events:
            stream.wait(event)

    def finish(self, until: Any = None) -> None:
        """Run the queued work of all streams. With `until`, run work only until the stream `until` is empty."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return
        order = sorted(self.streams, key=lambda stream: stream.slow)
        while (until is None or until.queue) and any(stream.step() for stream in order):
            pass
        if any(stream.queue for stream in ([until] if until else self.streams)):
            raise RuntimeError("the streams wait for each other")

    def store_on(self, stream: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self.runs_on(stream, copy or self.copy) as it:
            it.store(self.source if slots is None else slots)

    def load_on(self, stream: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self.runs_on(stream, copy or self.copy) as it:
            it.load(self.target if slots is None else slots, 0)

    @contextlib.contextmanager
    def runs_on(self, stream: Any, copy: Any) -> Iterator[Any]:
        copy.run = lambda work: [stream.submit(each) for each in work]
        yield copy

    def write(
        self, stream: Any, region: Region, expected: Expected, where: Callable[[Coordinates], torch.Tensor]
    ) -> None:
        """Queue work that competes with the transfer: write the expected content to the rows that `where` selects."""
        for section, into in zip(region.sections, region.tensors(), strict=True):
            at = section.coordinates(0, section.rows, self.device)
            chosen = where(at).nonzero()[:, 0]
            content = rows(expected(at).number()[chosen], into.shape[1], self.cell.seed)
            work = partial(into.index_copy_, 0, chosen.to(into.device), content.to(into.device))
            stream.submit(work, host=into.device.type != self.device.type)

    def write_to_source(self, stream: Any, generation: int) -> None:
        self.write(stream, self.cache, everywhere(generation), lambda at: torch.isin(at["slot"], self.source))


class ConnectorRace(Race):
    """A race in which LMCache's connector V2 or V3 does the transfer.

    A store or a load of LMCache returns only when it is complete, so LMCache needs no events of the race. On a GPU,
    LMCache uses the streams of the race. On the CPU, kvfix queues LMCache's transfers and runs them when LMCache calls
    `synchronize`. If a planted fault removes events, `synchronize` does nothing.
    """

    def transfer(self) -> Any:
        """Make the connector without a buffer on the device, because kvfix cannot queue copies through a buffer."""
        if self.device.type == "cuda" and not self.events:
            raise Refused("on a GPU, LMCache's events cannot be left out")
        connector = lmcache.Connector(self.cell.backend.partition("-")[2], self, buffer=False)
        self.result.operations = f"{connector.operations.partition(',')[0]}, with {self.result.operations}"
        return connector

    @contextlib.contextmanager
    def runs_on(self, stream: Any, copy: Any) -> Iterator[Any]:
        connector, module = copy.connector, lmcache.connectors(self.device.type)
        if self.device.type == "cuda":
            connector.store_stream = connector.load_stream = stream.native
            yield copy
            return
        its_own = cuda_stand_in.Stream()
        if self.events:
            its_own.synchronize = partial(self.finish, stream)  # type: ignore[method-assign]
        connector.store_stream = connector.load_stream = its_own
        operations = getattr(module, "device_ops", None) or module.lmc_ops
        transfer = operations.multi_layer_kv_transfer

        def submit(*arguments: Any, **more: Any) -> None:
            stream.submit(partial(transfer, *arguments, **more))

        with mock.patch.object(operations, "multi_layer_kv_transfer", submit):
            yield copy


def late_producer(race: Race) -> None:
    """Submit a store of KV before the kernel that writes this KV has run."""
    producer, copier = race.stream(slow=True), race.stream()
    race.write_to_source(producer, FIRST)
    race.after(copier, producer)
    race.store_on(copier)
    race.finish()
    race.compare("store after a late producer", race.copy.host, race.tokens(FIRST))


def early_reuse(race: Race) -> None:
    """Let another request write to blocks that a store still reads."""
    race.cache.fill(everywhere(FIRST))
    copier, other = race.stream(slow=True), race.stream()
    race.store_on(copier)
    race.after(other, copier)
    race.write_to_source(other, OTHER)
    race.finish()
    race.compare("store of blocks that another request writes", race.copy.host, race.tokens(FIRST))


def neighbours(race: Race) -> None:
    """During a store and a load, write to all slots that are neither stored nor loaded, even in the same blocks."""
    race.cache.fill(everywhere(FIRST))
    copier, hostile, loader = race.stream(slow=True), race.stream(), race.stream()
    both = torch.cat([race.source, race.target])
    race.store_on(copier)
    race.write(hostile, race.cache, everywhere(OTHER), lambda at: ~torch.isin(at["slot"], both))
    race.after(loader, copier)  # the writes to other slots need no event
    race.load_on(loader)
    race.finish()
    loaded = race.loaded(FIRST, 0)

    def expected(at: Coordinates) -> Identity:
        who, source = loaded(at), torch.isin(at["slot"], race.source)
        generation = torch.where(who.generation == POISON, torch.where(source, FIRST, OTHER), who.generation)
        return who._replace(generation=generation)

    race.compare("load during writes to neighbouring slots", race.cache, expected)


def many_in_flight(race: Race) -> None:
    """Run four pairs of a store and a load at once. Each pair has its own slots and host buffers."""
    race.cache.fill(everywhere(FIRST))
    for source, target in zip(race.source.chunk(4), race.target.chunk(4), strict=False):
        copy = TorchCopy(race, len(source))
        copy.host.fill(host_poison)
        storing, loading = race.stream(slow=True), race.stream()
        race.store_on(storing, copy, source)
        race.after(loading, storing)
        race.load_on(loading, copy, target)
    race.finish()
    loaded = race.loaded(FIRST, 0)
    race.compare("many in flight", race.cache, lambda at: loaded(at)._replace(generation=FIRST))


def buffer_taken_again(race: Race) -> None:
    """Let the next store write to host buffers that a load still reads."""
    race.cache.fill(everywhere(POISON))
    race.copy.host.fill(race.tokens(FIRST))
    loader, other = race.stream(slow=True), race.stream()
    race.load_on(loader)
    race.after(other, loader)
    race.write(other, race.copy.host, race.tokens(OTHER), lambda at: at["token"] >= 0)
    race.finish()
    race.compare("load from a buffer that the next store writes", race.cache, race.loaded(FIRST, 0))


RACES: dict[str, Callable[[Race], None]] = {
    race.__name__.replace("_", "-"): race
    for race in (late_producer, early_reuse, neighbours, many_in_flight, buffer_taken_again)
}


def of(backend: str) -> tuple[str, ...]:
    """Return the races that a backend can run. An LMCache connector has at most one transfer in flight."""
    if backend == "torch":
        return tuple(RACES)
    return tuple(name for name in RACES if name != "many-in-flight") if backend in ("lmcache-v2", "lmcache-v3") else ()


def run(name: str, cell: Cell, device: torch.device, events: bool = True, result: Result | None = None) -> Result:
    race = (Race if cell.backend == "torch" else ConnectorRace)(cell, device, events, result)
    RACES[name](race)
    return race.ended(race.copy.host)
