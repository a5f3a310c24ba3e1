"""Faults to be planted, so that the tool can show that it fails: `--inject`.

Each damages what a sound backend has moved: the host buffers after the store, or, where a backend keeps those to
itself, the KV cache after the load. The class of what is found must be the one that FAULTS has for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer
from kvfix_tools.roundtrip.element import BITS, STALE, Identity, rows
from kvfix_tools.roundtrip.region import Coordinates, Region

#: fault -> the class (mismatch.py) that it must be seen as.
FAULTS = {
    "swap-kv": "K and V swapped",
    "shift-slot": "wrong slot",
    "stale": "stale",
    "bitflip": "bit flip",
    "drop-tail": "not written",
    "wrong-layer": "wrong layer",
    "neighbour-write": "bystander written",
    "missing-event": "",  # races.py: the events are taken out; each race has its own class
}


@dataclass
class Faulty(Transfer):
    """A transfer with a fault in it."""

    inner: Transfer
    check: CellCheck
    fault: str

    def __post_init__(self) -> None:
        geometry, cell = self.check.geometry, self.check.cell
        if self.fault == "swap-kv" and geometry.layout.latent:
            raise Refused("MLA has neither K nor V")
        if self.fault == "shift-slot" and cell.count - cell.skipped < 2:
            raise Refused("one token has no neighbour")
        if self.fault == "wrong-layer" and geometry.layers < 2:
            raise Refused("there is one layer")
        self.host, self.operations = self.inner.host, self.inner.operations

    def store(self, slots: torch.Tensor) -> None:
        self.inner.store(slots)
        if self.host is not None and self.fault != "neighbour-write":
            self.damage(self.host)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        self.inner.load(slots, skip)
        if self.fault == "neighbour-write":
            self.write_to_neighbour(slots)
        elif self.host is None:
            self.damage(self.check.cache)

    def close(self) -> None:
        self.inner.close()

    def damage(self, region: Region) -> None:
        """Rows of the tokens of this region take what the fault makes them."""
        held, at = torch.cat(region.tensors()), region.coordinates()
        token = at["token"] if "token" in at else self._token_of(at["slot"])
        last = self.check.cell.count - 1
        live = token >= (0 if region is self.host else self.check.cell.skipped)
        if self.fault == "stale":
            chosen = live & (token >= last // 2)
            slots = self.check.source[token.clamp(min=0)].to(region.words.device)
            old = Identity(STALE, at["layer"], at["kv"], slots, at["head"], 0).number()
            changed = rows(old, region.geometry.row_words, region.seed)
        elif self.fault == "drop-tail":
            chosen = live & (token == last)
            changed = rows(self.check.poison(region)(at).number(), region.geometry.row_words, region.seed)
        elif self.fault == "bitflip":
            chosen = live & (token == last) & (at["layer"] == 0) & (at["kv"] == 0) & (at["head"] == 0)
            changed = held.clone()
            changed[:, 0] ^= 1 << 37
        else:
            chosen, changed = live, held[self._partners(at, token)]
        tensors = region.tensors()
        lengths = [len(tensor) for tensor in tensors]
        for tensor, here, content in zip(tensors, chosen.split(lengths), changed.split(lengths), strict=True):
            tensor.copy_(torch.where(here[:, None], content, tensor))

    def write_to_neighbour(self, slots: torch.Tensor) -> None:
        """A row goes into a slot of no token of this load."""
        taken = set(slots.tolist())
        free = next(slot for slot in range(self.check.geometry.slots) if slot not in taken)
        cache, last = self.check.cache, int(slots[-1])
        for section, tensor in zip(cache.sections, cache.tensors(), strict=True):
            slot = section.coordinates(0, section.rows, tensor.device)["slot"]
            tensor[int((slot == free).nonzero()[0])] = tensor[int((slot == last).nonzero()[0])]

    def _partners(self, at: Coordinates, token: torch.Tensor) -> torch.Tensor:
        """For each row the row whose content it takes; itself where there is none."""
        last, geometry = self.check.cell.count - 1, self.check.geometry
        kv = 1 - at["kv"] if self.fault == "swap-kv" else at["kv"]
        layer = (at["layer"] + 1) % geometry.layers if self.fault == "wrong-layer" else at["layer"]
        moved = torch.where(token < last, token + 1, token) if self.fault == "shift-slot" else token
        none = (1 << BITS["slot"]) - 1
        who = Identity(0, at["layer"], at["kv"], torch.where(token < 0, none, token), at["head"], 0).number()
        wanted = Identity(0, layer, kv, torch.where(token < 0, none, moved), at["head"], 0).number()
        order = who.argsort()
        return order[torch.searchsorted(who[order], wanted).clamp(max=len(order) - 1)]

    def _token_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Token loaded into each slot; -1 for none."""
        table = torch.full((self.check.geometry.slots,), -1, dtype=torch.int64, device=slots.device)
        table[self.check.target] = torch.arange(self.check.cell.count, device=slots.device)
        return table[slots]
