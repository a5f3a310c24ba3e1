"""The check of one cell: store, load and round trip, each against what the definition of the layout says.

The KV cache is filled with generation 1, every slot with its own identity, and the host buffers with poison. After the
store the host must hold exactly the stored tokens, and the KV cache what it held. Then the KV cache is poisoned and the
tokens are loaded into other slots: these must hold them, and every other word its poison. Last the host is made by the
definition, with generation 2, and loaded: so a store and a load that are wrong in the same way are both seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.element import FIRST, HOST_POISON, POISON, SECOND, Identity
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.mismatch import Finding, find
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region


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
    """`verdict`: passed, failed, refused (with `reason`). Bytes, seconds of the fastest store and load; and of a plain
    copy of as many bytes there and back. `check_seconds`: of a whole check, filling and verifying included, if that was
    timed (speed.py)."""

    cell: Cell
    verdict: str
    findings: list[Finding] = field(default_factory=list)
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
        self.result = result or Result(cell, "passed")
        self.result.moved = self.geometry.token_bytes(cell.count)

    def run(self, transfer: Transfer, brief: bool = False) -> Result:
        """brief: without the load from host buffers made by the definition; after a right store they hold the same."""
        result, skip = self.result, self.cell.skipped
        result.operations = transfer.operations
        try:
            if brief:  # the host buffers hold an earlier generation: that is poison enough
                self.cache.fill(everywhere(FIRST))
            else:
                self.prepare(transfer)
            result.store = self._timed(transfer.store, self.source, result.store)
            self.compare("store", self.cache, everywhere(FIRST), source=True)
            if transfer.host is not None:
                self.compare("store", transfer.host, self.tokens(FIRST))
            self.cache.fill(everywhere(POISON))
            result.load = self._timed(transfer.load, self.target, result.load, skip)
            self.compare("round trip", self.cache, self.loaded(FIRST, skip))
            if transfer.host is not None and not brief:
                self.cache.fill(everywhere(POISON))
                transfer.host.fill(self.tokens(SECOND))
                result.load = self._timed(transfer.load, self.target, result.load, skip)
                self.compare("load", self.cache, self.loaded(SECOND, skip))
                self.compare("load", transfer.host, self.tokens(SECOND), source=True)
        finally:
            transfer.close()
        result.verdict = "failed" if result.findings else "passed"
        result.verified = self.cache.verified + (transfer.host.verified if transfer.host is not None else 0)
        return result

    def prepare(self, transfer: Transfer) -> None:
        self.cache.fill(everywhere(FIRST))
        if transfer.host is not None:
            transfer.host.fill(self.poison(transfer.host))

    def poison(self, region: Region) -> Expected:
        """What is in the KV cache, or in the host buffers, before anything is moved there."""
        if region is self.cache:
            return everywhere(POISON)
        return lambda at: Identity(HOST_POISON, at["layer"], at["kv"], at["token"], at["head"], 0)

    def compare(self, stage: str, region: Region, expected: Expected, source: bool = False) -> None:
        finding = find(region, list(region.compare(expected)), f"{stage}, {region.name}", source)
        if finding is not None:
            self.result.findings.append(finding)

    def tokens(self, generation: int) -> Expected:
        """What the host must hold: of each token what was in its slot."""
        return lambda at: Identity(generation, at["layer"], at["kv"], self.source[at["token"]], at["head"], 0)

    def loaded(self, generation: int, skip: int) -> Expected:
        """What the KV cache must hold after a load into poison: the tokens in their slots, elsewhere the poison."""
        source_of = torch.full((self.geometry.slots,), -1, dtype=torch.int64, device=self.device)
        source_of[self.target[skip:]] = self.source[skip:]

        def expected(at: Coordinates) -> Identity:
            held = source_of[at["slot"]]
            known = held >= 0
            generations = torch.where(known, generation, POISON)
            return Identity(generations, at["layer"], at["kv"], torch.where(known, held, at["slot"]), at["head"], 0)

        return expected

    def time_both(self, transfer: Transfer) -> None:
        """A store and a load of another generation that is not looked at; the fastest count."""
        self.cache.fill(everywhere(SECOND))
        self.result.store = self._timed(transfer.store, self.source, self.result.store)
        self.result.load = self._timed(transfer.load, self.target, self.result.load, self.cell.skipped)

    def _timed(self, move: Any, slots: torch.Tensor, best: float, *more: int) -> float:
        """Seconds, or the best so far."""
        taken = seconds(lambda: move(slots, *more), self.device)
        return min(taken, best or taken)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """That this work takes; the device has finished before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def everywhere(generation: int) -> Expected:
    """Every slot holds itself."""
    return lambda at: Identity(generation, at["layer"], at["kv"], at["slot"], at["head"], 0)
