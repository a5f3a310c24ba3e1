"""Model the memory of a rank as bytes, and copies in flight, for connectors that copy bytes between addresses.

A copy takes several steps of the engine. If a piece of the source changes before the copy ends, the copy writes garbage
to the target. So the lab detects if other requests write to the source too early.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from kvfix_tools.lab.engine.memory import GARBAGE, Block, Slots
from kvfix_tools.lab.options import Options

#: Floats in a head's slot: 32 for K, 32 for V (kv_layout.kv_cache). The content (memory.py) fills the first two floats.
FLOATS = 64
#: SLOT: bytes in the slot of one head. WORD: bytes of the content of a slot.
SLOT, WORD = 4 * FLOATS, 8
Pieces = Iterable[tuple[int, int, int]]  # (source address, target address, size in bytes) of each piece


class SharedBlock(Block):
    """A block whose slots are in the tensor that all connectors of a rank share."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, place: Any) -> Any:
        return self._slots[place].tolist()

    def __setitem__(self, place: Any, contents: Any) -> None:
        self._slots[place] = contents


class HeadsBlock(SharedBlock):
    """A block with several KV heads, or with one head that is not the first head of the model.

    Each head of a slot holds the slot's content XOR (head's number << 32). If the heads of a slot have different
    contents, reading the slot returns garbage. slots: array [heads, slots]. heads: numbers of the heads in the model.
    """

    def __init__(self, slots: Any, heads: range) -> None:
        super().__init__(slots)
        self._marks = (numpy.array(heads, dtype=numpy.int64) << 32)[:, None]

    def __len__(self) -> int:
        return int(self._slots.shape[1])

    def __getitem__(self, place: Any) -> Any:
        found = self._marked(self._slots[:, place])
        return numpy.where((found == found[0]).all(0), found[0], GARBAGE).tolist()

    def __setitem__(self, place: Any, contents: Any) -> None:
        self._slots[:, place] = self._marked(numpy.array([contents], dtype=numpy.int64))

    def _marked(self, contents: Any) -> Any:
        return numpy.where(contents == GARBAGE, contents, contents ^ self._marks)


def tensor(slots: Slots, options: Options, rank: int = 0) -> torch.Tensor:
    """Return these slots as a tensor [blocks, heads, slots, FLOATS]. All connectors of a rank share this tensor."""
    if slots.tensor is None:
        slots.tensor = torch.zeros((len(slots), options.heads_of_rank, slots.room, FLOATS), dtype=torch.float32)
        first = rank * options.kv_heads // options.ranks
        heads = range(first, first + options.heads_of_rank)
        contents = slots.tensor.view(torch.int64)[..., 0].numpy()
        alone = heads == range(1)
        slots.put_in([SharedBlock(block[0]) if alone else HeadsBlock(block, heads) for block in contents])
    return slots.tensor


def contents_of(row: Any, size: int) -> list[int]:
    """Return the contents of the first `size` slots of a copied block. row: the bytes of the block as an array."""
    contents: list[int] = row[: size * SLOT].view("q")[:: SLOT // WORD].tolist()
    return contents


def _garbage(size: int) -> bytes:
    return numpy.full(size // WORD, GARBAGE, dtype=numpy.int64).tobytes()


class Copy:
    """A copy in flight. due: the step in which the copy ends. done: the function to call at the end."""

    def __init__(self, pieces: Pieces, due: int, done: Callable[[], None] = lambda: None) -> None:
        self.due, self._done = due, done
        self._pieces = list(pieces)
        self._found = [ctypes.string_at(source, size) for source, _, size in self._pieces]

    def arrive(self) -> None:
        for (source, target, size), found in zip(self._pieces, self._found, strict=True):
            ctypes.memmove(target, found if ctypes.string_at(source, size) == found else _garbage(size), size)
        self._done()


def spoil(pieces: Pieces) -> None:
    """Write garbage to the targets of a failed copy, because any part of the copy may have arrived."""
    for _, target, size in pieces:
        ctypes.memmove(target, _garbage(size), size)
