"""What a transfer must wait for, with the waiting and, as the negative control, without.

A race is some work on a few streams (streams.py), and the events between them. Each says what must not happen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.backends.torch_copy import TorchCopy
from kvfix_tools.roundtrip.cell_check import CellCheck, Result, everywhere
from kvfix_tools.roundtrip.element import FIRST, OTHER, POISON, STALE, Identity
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region
from kvfix_tools.roundtrip.streams import Streams


class Race(CellCheck):
    """A cell whose transfer runs while other work does: that of the torch backend."""

    def __init__(self, cell: Cell, device: torch.device, events: bool) -> None:
        super().__init__(cell, device)
        self.streams = Streams(device, events)
        self.result.operations = "streams" if device.type == "cuda" else "streams by a stand-in: deferred, in order"
        self.copy: Any = self.transfer()
        self.host: Region = self.copy.host
        self.cache.fill(everywhere(STALE))
        self.host.fill(self.poison(self.host))

    def transfer(self) -> Any:
        return TorchCopy(self)

    def ended(self) -> Result:
        self.result.verdict = "failed" if self.result.findings else "passed"
        self.result.verified = self.cache.verified + self.host.verified
        return self.result

    def store(self, stream: Any, copy: TorchCopy | None = None, slots: torch.Tensor | None = None) -> None:
        self._each(stream, copy or self.copy, self.source if slots is None else slots, TorchCopy.gather)

    def load(self, stream: Any, copy: TorchCopy | None = None, slots: torch.Tensor | None = None) -> None:
        def scatter(one: TorchCopy, buffer: torch.Tensor, part: torch.Tensor, staging: torch.Tensor) -> None:
            one.scatter(buffer, part, staging, 0)

        self._each(stream, copy or self.copy, self.target if slots is None else slots, scatter)

    def write(
        self, stream: Any, region: Region, expected: Expected, where: Callable[[Coordinates], torch.Tensor]
    ) -> None:
        """Other work: those rows of the region take that content, tensor by tensor."""
        image = regions.Region(region.words.clone(), region.sections, self.geometry, self.device, self.cell.seed, "")
        image.fill(expected, guards=False)
        for section, into, content in zip(region.sections, region.tensors(), image.tensors(), strict=True):
            chosen = where(section.coordinates(0, section.rows, into.device)).nonzero()[:, 0]
            work = partial(into.index_copy_, 0, chosen, content[chosen])
            stream.submit(work, host=into.device.type != self.device.type)

    def in_slots(self, slots: torch.Tensor) -> Callable[[Coordinates], torch.Tensor]:
        return lambda at: torch.isin(at["slot"], slots)

    def _each(self, stream: Any, copy: TorchCopy, slots: torch.Tensor, move: Any) -> None:
        for buffer, part in zip(copy.buffers, slots.split(copy.chunk), strict=True):
            stream.submit(partial(move, copy, buffer, part, copy.staging[0]))


def late_producer(race: Race) -> None:
    """The kernel that writes the KV is still to run when the store is submitted."""
    producer, copier = race.streams.stream(slow=True), race.streams.stream()
    race.write(producer, race.cache, everywhere(FIRST), race.in_slots(race.source))
    race.streams.after(copier, producer)
    race.store(copier)
    race.streams.finish()
    race.compare("store after a late producer", race.host, race.tokens(FIRST))


def early_reuse(race: Race) -> None:
    """The blocks of a request are given to another one, which writes to them, while they are being stored."""
    race.cache.fill(everywhere(FIRST))
    copier, other = race.streams.stream(slow=True), race.streams.stream()
    race.store(copier)
    race.streams.after(other, copier)
    race.write(other, race.cache, everywhere(OTHER), race.in_slots(race.source))
    race.streams.finish()
    race.compare("store of blocks that are used again", race.host, race.tokens(FIRST))


def neighbours(race: Race) -> None:
    """Another stream writes to all other slots, of the same blocks too, while a store and a load run. No event is
    needed but between the store and its load."""
    race.cache.fill(everywhere(FIRST))
    copier, hostile, loader = race.streams.stream(slow=True), race.streams.stream(), race.streams.stream()
    both = torch.cat([race.source, race.target])
    race.store(copier)
    race.write(hostile, race.cache, everywhere(OTHER), lambda at: ~torch.isin(at["slot"], both))
    race.streams.after(loader, copier)
    race.load(loader)
    race.streams.finish()
    loaded = race.loaded(FIRST, 0)

    def expected(at: Coordinates) -> Identity:
        who, source = loaded(at), torch.isin(at["slot"], race.source)
        generation = torch.where(who.generation == POISON, torch.where(source, FIRST, OTHER), who.generation)
        return who._replace(generation=generation)

    race.compare("load beside writes to its neighbours", race.cache, expected)


def many_in_flight(race: Race) -> None:
    """Four stores and their loads at once, each with its own part of the slots and host buffers of its own."""
    race.cache.fill(everywhere(FIRST))
    for source, target in zip(race.source.chunk(4), race.target.chunk(4), strict=False):
        copy = TorchCopy(race, len(source))
        copy.host.fill(race.poison(copy.host))
        storing, loading = race.streams.stream(slow=True), race.streams.stream()
        race.store(storing, copy, source)
        race.streams.after(loading, storing)
        race.load(loading, copy, target)
    race.streams.finish()
    loaded = race.loaded(FIRST, 0)
    race.compare(
        "many in flight", race.cache, lambda at: loaded(at)._replace(generation=torch.full_like(at["slot"], FIRST))
    )


def buffer_taken_again(race: Race) -> None:
    """Host buffers are handed back while a load still reads them, and the next store takes them."""
    race.cache.fill(everywhere(POISON))
    race.host.fill(race.tokens(FIRST))
    loader, other = race.streams.stream(slow=True), race.streams.stream()
    race.load(loader)
    race.streams.after(other, loader)
    race.write(other, race.host, race.tokens(OTHER), lambda at: at["token"] >= 0)
    race.streams.finish()
    race.compare("load from a buffer that is taken again", race.cache, race.loaded(FIRST, 0))


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
    """One race. events: False takes out what the streams wait for."""
    if cell.backend == "torch":
        race = Race(cell, device, events)
    else:
        from kvfix_tools.roundtrip.races_lmcache import ConnectorRace  # imports LMCache

        race = ConnectorRace(cell, device, events)
    race.result.race = name
    RACES[name](race)
    return race.ended()
