"""Check one cell (one test case): compare all bytes after each copy with the expected bytes (docs/roundtrip.md)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch

from kvfix_tools.roundtrip.element import FIRST, HOST_POISON, POISON, SECOND, Identity
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.mismatch import Mismatch, find
from kvfix_tools.roundtrip.region import Coordinates, Expected, Region, make

REPEATS = 3  # repetitions of a timed copy


class Refused(Exception):
    """The backend cannot copy the KV of this cell, and says why before it moves KV. A refusal is not a finding."""


class Transfer:
    host: Region | None = None  # the host buffers; None if the backend does not expose them
    operations = ""  # text about the operations that move the bytes

    def store(self, slots: torch.Tensor) -> None:
        """Copy the KV of these slots [tokens] to the host, and return when the copy is complete."""
        raise NotImplementedError

    def load(self, slots: torch.Tensor, skip: int) -> None:
        """Copy all tokens except the first `skip` from the host into their slots. Return when the copy is complete."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources. kvfix calls `close` even after an error."""


@dataclass
class Result:
    cell: Cell
    verdict: str = "passed"  # "passed", "failed", "refused" or "crashed"
    findings: list[Mismatch] = field(default_factory=list)
    reason: str = ""
    moved: int = 0  # bytes
    verified: int = 0  # bytes
    store: float = 0.0  # seconds of the fastest store
    load: float = 0.0
    plain_store: float = 0.0  # seconds of a plain copy of `moved` bytes
    plain_load: float = 0.0
    check_seconds: float = 0.0  # seconds of the check, including filling and verifying; 0 if not timed
    operations: str = ""
    race: str = ""


class CellCheck:
    """The check of one cell on one device. cache: the KV cache that the backend copies. The check updates `result`."""

    def __init__(self, cell: Cell, device: torch.device, result: Result | None = None) -> None:
        self.cell, self.device = cell, device
        self.geometry = cell.geometry()
        self.source, self.target = (slots.to(device) for slots in cell.mappings())
        parts = [(self.geometry.sizes(), None)]
        self.cache = make("KV cache", self.geometry, self.geometry.layout.axes, parts, device, cell.seed)
        self.result = result or Result(cell)
        self.result.moved = self.geometry.token_bytes(cell.count)

    def host(self, axes: str, tokens: int = 0) -> Region:
        """Make host buffers for `tokens` tokens (0: all of the cell), one buffer per chunk. axes: outermost first."""
        sizes, latent = self.geometry.sizes, self.geometry.layout.latent
        chunk, tokens = int(self.cell.chunk), tokens or self.cell.count
        order = tuple(axis for axis in axes.split() if axis not in ("kv", "head") or not latent)
        parts = [(sizes(min(chunk, tokens - first)), first) for first in range(0, tokens, chunk)]
        return make("host", self.geometry, order, parts, self.device, self.cell.seed)

    def run(self, transfer: Transfer, brief: bool = False) -> Result:
        """Run the check. brief: do not fill the host buffers, and load only KV that this check stored."""
        self.result.operations = transfer.operations
        host = transfer.host
        try:
            if brief:  # the host buffers already hold other KV, from an earlier store
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
        if finding := find(region, list(region.compare(expected)), f"{stage}, {region.name}", source):
            self.result.findings.append(finding)

    def tokens(self, generation: int) -> Expected:
        return lambda at: Identity(generation, at["layer"], at["kv"], self.source[at["token"]], at["head"], 0)

    def token_in(self, skip: int) -> torch.Tensor:
        """Return a tensor [slots]: the token that a load puts into each slot, or -1 for no token."""
        found = torch.full((self.geometry.slots,), -1, dtype=torch.int64, device=self.device)
        found[self.target[skip:]] = torch.arange(skip, self.cell.count, device=self.device)
        return found

    def loaded(self, generation: int, skip: int | None = None) -> Expected:
        """Return what the KV cache must hold after a load: tokens in their slots, and the earlier filling elsewhere."""
        token_in = self.token_in(self.cell.skipped if skip is None else skip)

        def expected(at: Coordinates) -> Identity:
            token = token_in[at["slot"]]
            known = token >= 0
            slot = torch.where(known, self.source[token.clamp(min=0)], at["slot"])
            return Identity(torch.where(known, generation, POISON), at["layer"], at["kv"], slot, at["head"], 0)

        return expected

    def store(self, transfer: Transfer) -> None:
        """Store, and record the time if this store is the fastest."""
        taken = seconds(lambda: transfer.store(self.source), self.device)
        self.result.store = min(taken, self.result.store or taken)

    def load(self, transfer: Transfer) -> None:
        taken = seconds(lambda: transfer.load(self.target, self.cell.skipped), self.device)
        self.result.load = min(taken, self.result.load or taken)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Run `work` and return the seconds that it takes. Synchronize the device before and after `work`."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@lru_cache(maxsize=512)
def plain(size: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of the fastest plain copy to the host, and back. The first copy each way does not count."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    both = (on_host, on_device), (on_device, on_host)
    copies = (partial(to.copy_, source, non_blocking=True) for to, source in both)
    store, load = (min([seconds(copy, device) for _ in range(REPEATS + 1)][1:]) for copy in copies)
    return store, load


def everywhere(generation: int) -> Expected:
    """Return the content of a KV cache in which each row encodes its own position (`Identity`)."""
    return lambda at: Identity(generation, at["layer"], at["kv"], at["slot"], at["head"], 0)


def host_poison(at: Coordinates) -> Identity:
    """Return the identity of a host row before a store. After the store, this identity marks a row that lacks KV."""
    return Identity(HOST_POISON, at["layer"], at["kv"], at["token"], at["head"], 0)
