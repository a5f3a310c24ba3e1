"""The check of one cell: store, load and round trip, each against what the definition of the layout says.

The KV cache is filled with generation 1, every slot with its own identity, and the host buffers with poison. After the
store the host must hold exactly the stored tokens, and the KV cache what it held. Then the KV cache is poisoned and the
tokens are loaded into other slots: these must hold them, and every other word its poison. Last the host is made by the
definition, with generation 2, and loaded: so a store and a load that are wrong in the same way are both found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.element import FIRST, HOST_POISON, POISON, SECOND, Identity
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.mismatch import Mismatch, find
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region

#: Of a timed copy.
REPEATS = 3


class Refused(Exception):
    """The backend cannot do this, and says why before it moves anything: no finding."""


class Transfer:
    """What moves KV between the KV cache and host buffers, for one cell. `host`: these buffers; None where the backend
    keeps them to itself. `operations`: which operations it runs, in words."""

    host: Region | None = None
    operations = ""

    def store(self, slots: torch.Tensor) -> None:
        """The KV of the tokens in these slots [tokens] to the host; done when it returns."""
        raise NotImplementedError

    def load(self, slots: torch.Tensor, skip: int) -> None:
        """From the host into these slots, but for the first `skip` tokens; done when it returns."""
        raise NotImplementedError

    def close(self) -> None:
        """At the end, whatever has happened."""


@dataclass
class Result:
    """`verdict`: passed, failed, refused or crashed (with `reason`). Bytes, seconds of the fastest store and load; and
    of a plain copy of as many bytes there and back. `check_seconds`: of a whole check, filling and verifying included,
    if that was timed."""

    cell: Cell
    verdict: str = "passed"
    findings: list[Mismatch] = field(default_factory=list)
    reason: str = ""
    moved: int = 0
    verified: int = 0
    store: float = 0.0
    load: float = 0.0
    plain_store: float = 0.0
    plain_load: float = 0.0
    check_seconds: float = 0.0
    operations: str = ""
    race: str = ""


class CellCheck:
    """One cell on one device. `cache`: the KV cache that the backend works on; `result`: what is found, as it is."""

    def __init__(self, cell: Cell, device: torch.device, result: Result | None = None) -> None:
        self.cell, self.device = cell, device
        self.geometry = cell.geometry()
        self.source, self.target = (slots.to(device) for slots in cell.mappings())
        self.cache = regions.kv_cache(self.geometry, device, cell.seed)
        self.result = result or Result(cell)
        self.result.moved = self.geometry.token_bytes(cell.count)

    def host(self, axes: str, tokens: int = 0) -> Region:
        """Host buffers for the tokens of the cell, or for so many; a chunk's axes, outermost first."""
        chunk, tokens = int(self.cell.chunk), tokens or self.cell.count
        return regions.host(self.geometry, axes, chunk, tokens, self.device, self.cell.seed)

    def run(self, transfer: Transfer, brief: bool = False) -> Result:
        """brief: without the load from host buffers made by the definition; after a right store they hold the same."""
        self.result.operations = transfer.operations
        host = transfer.host
        try:
            if brief:  # the host buffers hold an earlier generation: that is poison enough
                self.cache.fill(everywhere(FIRST))
            else:
                self.prepare(transfer)
            self.store(transfer)
            self.compare("store", self.cache, everywhere(FIRST), source=True)
            if host is not None:
                self.compare("store", host, self.tokens(FIRST))
            self.cache.fill(everywhere(POISON))
            self.load(transfer)
            self.compare("round trip", self.cache, self.loaded(FIRST))
            if host is not None and not brief:
                self.cache.fill(everywhere(POISON))
                host.fill(self.tokens(SECOND))
                self.load(transfer)
                self.compare("load", self.cache, self.loaded(SECOND))
                self.compare("load", host, self.tokens(SECOND), source=True)
        finally:
            transfer.close()
        return self.ended(host)

    def ended(self, host: Region | None) -> Result:
        self.result.verdict = "failed" if self.result.findings else "passed"
        self.result.verified = self.cache.verified + (host.verified if host is not None else 0)
        return self.result

    def prepare(self, transfer: Transfer) -> None:
        self.cache.fill(everywhere(FIRST))
        if transfer.host is not None:
            transfer.host.fill(host_poison)

    def compare(self, stage: str, region: Region, expected: Expected, source: bool = False) -> None:
        finding = find(region, list(region.compare(expected)), f"{stage}, {region.name}", source)
        if finding is not None:
            self.result.findings.append(finding)

    def tokens(self, generation: int) -> Expected:
        """What the host must hold: of each token what was in its slot."""
        return lambda at: Identity(generation, at["layer"], at["kv"], self.source[at["token"]], at["head"], 0)

    def token_in(self, skip: int) -> torch.Tensor:
        """[slots]: the token that a load brings into each slot; -1 for none."""
        found = torch.full((self.geometry.slots,), -1, dtype=torch.int64, device=self.device)
        found[self.target[skip:]] = torch.arange(skip, self.cell.count, device=self.device)
        return found

    def loaded(self, generation: int, skip: int | None = None) -> Expected:
        """What the KV cache must hold after a load into poison: the tokens in their slots, elsewhere the poison."""
        token_in = self.token_in(self.cell.skipped if skip is None else skip)

        def expected(at: Coordinates) -> Identity:
            token = token_in[at["slot"]]
            known = token >= 0
            slot = torch.where(known, self.source[token.clamp(min=0)], at["slot"])
            return Identity(torch.where(known, generation, POISON), at["layer"], at["kv"], slot, at["head"], 0)

        return expected

    def store(self, transfer: Transfer) -> None:
        """Timed; the fastest counts."""
        taken = seconds(lambda: transfer.store(self.source), self.device)
        self.result.store = min(taken, self.result.store or taken)

    def load(self, transfer: Transfer) -> None:
        taken = seconds(lambda: transfer.load(self.target, self.cell.skipped), self.device)
        self.result.load = min(taken, self.result.load or taken)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """That this work takes; the device has finished before and after."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@lru_cache(maxsize=512)
def plain(size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one plain copy of so many bytes to pinned memory, and of one back: measured once in a run. The fastest
    counts, and the first does not."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    both = (on_host, on_device), (on_device, on_host)
    store, load = (
        min([seconds(partial(to.copy_, source, non_blocking=True), device) for _ in range(REPEATS + 1)][1:])
        for to, source in both
    )
    return store, load


def everywhere(generation: int) -> Expected:
    """Every slot holds itself."""
    return lambda at: Identity(generation, at["layer"], at["kv"], at["slot"], at["head"], 0)


def host_poison(at: Coordinates) -> Identity:
    """What is in the host buffers before anything is moved there."""
    return Identity(HOST_POISON, at["layer"], at["kv"], at["token"], at["head"], 0)
