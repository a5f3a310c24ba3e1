"""Plant a fault (`--inject`): damage the host buffers after a store, or the KV cache after a load."""

from typing import Any

import torch

from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer, everywhere, host_poison
from kvfix_tools.roundtrip.element import FIRST, POISON, STALE, Identity, rows
from kvfix_tools.roundtrip.region import Coordinates

#: {fault: class that the check must report for the wrong 8-byte words of the KV (mismatch.py)}
FAULTS = {
    "swap-kv": "K and V swapped",
    "shift-slot": "wrong slot",
    "stale": "stale",
    "bitflip": "bit flip",
    "drop-tail": "not written",
    "wrong-layer": "wrong layer",
    "neighbour-write": "other slot written",
    "missing-event": "",  # any class: races.py leaves out the events, and the class depends on the race
}


def plant(fault: str, transfer: Transfer, check: CellCheck) -> None:
    """Let a transfer write wrong words to some rows. Raise Refused if the cell (a test case) cannot show the fault."""
    geometry, cell = check.geometry, check.cell
    if fault == "swap-kv" and geometry.layout.latent:
        raise Refused("MLA has no K and V to swap")
    if fault == "shift-slot" and cell.count - cell.skipped < 2:
        raise Refused("a cell with one token has no other slot")
    if fault == "wrong-layer" and geometry.layers < 2:
        raise Refused("the KV cache has only one layer")
    host = None if fault == "neighbour-write" else transfer.host
    region, name = (check.cache, "load") if host is None else (host, "store")
    move, token_in = getattr(transfer, name), check.token_in(cell.skipped)

    def move_and_damage(*slots: Any) -> None:
        move(*slots)
        for section, tensor in zip(region.sections, region.tensors(), strict=True):
            chosen, who = planted(fault, check, token_in, section.coordinates(0, section.rows, check.device))
            content = rows(who.number()[chosen], tensor.shape[1], region.seed)
            if fault == "bitflip":
                content[:, 0] ^= 1 << 37
            tensor[chosen.to(tensor.device)] = content.to(tensor.device)

    setattr(transfer, name, move_and_damage)


def planted(fault: str, check: CellCheck, token_in: torch.Tensor, at: Coordinates) -> tuple[torch.Tensor, Identity]:
    """Return (True for each row to damage, wrong identity of each row). token_in: see CellCheck.token_in."""
    source, last = check.source, check.cell.count - 1
    token = at["token"] if "token" in at else token_in[at["slot"]]
    moved = token >= 0
    right = Identity(FIRST, at["layer"], at["kv"], source[token.clamp(min=0)], at["head"], 0)
    if fault == "swap-kv":
        return moved, right._replace(kv=1 - at["kv"])
    if fault == "wrong-layer":
        return moved, right._replace(layer=(at["layer"] + 1) % check.geometry.layers)
    if fault == "shift-slot":
        return moved, right._replace(slot=source[(token + 1).clamp(max=last)])
    if fault == "stale":
        return moved & (token >= last // 2), right._replace(generation=STALE)
    if fault == "bitflip":
        return (token == last) & (at["layer"] + at["kv"] + at["head"] == 0), right
    if fault == "drop-tail":
        return token == last, host_poison(at) if "token" in at else everywhere(POISON)(at)
    free = int((token_in < 0).nonzero()[0])  # neighbour-write
    return at["slot"] == free, right._replace(slot=source[last])
