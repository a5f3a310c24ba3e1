"""The memory of a rank as bytes, and copies in flight, for connectors that copy between addresses.

A copy takes some steps of the engine. If a part of the source changes before the copy ends, the same part of the
target gets garbage. So vLLM must not let other requests write to the source until the copy has ended.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from kvfix_tools.lab.engine.memory import GARBAGE, Block, Slots
from kvfix_tools.lab.options import Options

#: Floats in the slot of one head: 32 for K, 32 for V (kv_layout.kv_cache). The first two hold the content (memory.py).
FLOATS = 64
#: SLOT: bytes in the slot of one head. WORD: bytes of the content of a slot.
SLOT, WORD = 4 * FLOATS, 8
Pieces = Iterable[tuple[int, int, int]]  # (source address, target address, bytes) of each piece of a copy


class SharedBlock(Block):
    """A block with its slots in shared memory."""

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

    Each slot has its content once for each head, XORed with the head's number << 32. A slot whose heads have different
    contents reads as garbage.

    slots: array [heads, slots]. heads: the numbers of these heads in the model.
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
    """Return the memory of these slots as the tensor [blocks, heads, slots, FLOATS] of all connectors of a rank."""
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
    """Write garbage to the targets, because any part of a failed copy may have arrived."""
    for _, target, size in pieces:
        ctypes.memmove(target, _garbage(size), size)
