"""Planted faults (`--inject`), which prove that the tool finds errors.

A fault damages the host buffers after the store, or the KV cache after the load if the backend does not expose its host
buffers. The tool must find the class in FAULTS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer, everywhere, host_poison
from kvfix_tools.roundtrip.element import FIRST, POISON, STALE, Identity, rows
from kvfix_tools.roundtrip.region import Coordinates, Region

#: {fault: the class (mismatch.py) that the tool must find}
FAULTS = {
    "swap-kv": "K and V swapped",
    "shift-slot": "wrong slot",
    "stale": "stale",
    "bitflip": "bit flip",
    "drop-tail": "not written",
    "wrong-layer": "wrong layer",
    "neighbour-write": "bystander written",
    "missing-event": "",  # races.py leaves out the events, and each race has its own class
}


@dataclass
class Faulty(Transfer):
    """A transfer with a planted fault: some rows hold a wrong identity."""

    inner: Transfer
    check: CellCheck
    fault: str

    def __post_init__(self) -> None:
        geometry, cell = self.check.geometry, self.check.cell
        if self.fault == "swap-kv" and geometry.layout.latent:
            raise Refused("MLA has no K and V to swap")
        if self.fault == "shift-slot" and cell.count - cell.skipped < 2:
            raise Refused("a cell with one token has no other slot")
        if self.fault == "wrong-layer" and geometry.layers < 2:
            raise Refused("the KV cache has only one layer")
        self.host, self.operations = self.inner.host, self.inner.operations
        self.token_in = self.check.token_in(cell.skipped)

    def store(self, slots: torch.Tensor) -> None:
        self.inner.store(slots)
        if self.host is not None and self.fault != "neighbour-write":
            self.damage(self.host)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        self.inner.load(slots, skip)
        if self.host is None or self.fault == "neighbour-write":
            self.damage(self.check.cache)

    def close(self) -> None:
        self.inner.close()

    def damage(self, region: Region) -> None:
        for section, tensor in zip(region.sections, region.tensors(), strict=True):
            at = section.coordinates(0, section.rows, self.check.device)
            chosen, who = self.planted(at)
            content = rows(who.number()[chosen], tensor.shape[1], region.seed)
            if self.fault == "bitflip":
                content[:, 0] ^= 1 << 37
            tensor[chosen.to(tensor.device)] = content.to(tensor.device)

    def planted(self, at: Coordinates) -> tuple[torch.Tensor, Identity]:
        """Return the rows to damage, and their wrong identities."""
        source, last, layers = self.check.source, self.check.cell.count - 1, self.check.geometry.layers
        token = at["token"] if "token" in at else self.token_in[at["slot"]]
        moved = token >= 0
        right = Identity(FIRST, at["layer"], at["kv"], source[token.clamp(min=0)], at["head"], 0)
        if self.fault == "swap-kv":
            return moved, right._replace(kv=1 - at["kv"])
        if self.fault == "wrong-layer":
            return moved, right._replace(layer=(at["layer"] + 1) % layers)
        if self.fault == "shift-slot":
            return moved, right._replace(slot=source[(token + 1).clamp(max=last)])
        if self.fault == "stale":
            return moved & (token >= last // 2), right._replace(generation=STALE)
        if self.fault == "bitflip":
            return (token == last) & (at["layer"] + at["kv"] + at["head"] == 0), right
        if self.fault == "drop-tail":
            return token == last, host_poison(at) if "token" in at else everywhere(POISON)(at)
        free = int((self.token_in < 0).nonzero()[0])  # neighbour-write
        return at["slot"] == free, right._replace(slot=source[last])
