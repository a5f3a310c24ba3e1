"""The matrix: its axes, one cell of it, and which cells are run: all, or enough to have every pair of values."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from kvfix_tools.roundtrip.layout import DTYPES, LAYOUTS, Geometry

#: Names of token counts; a number is itself.
TOKENS = ("1", "block-1", "block", "block+1", "chunk-1", "chunk", "chunk+1", "prime")
SLOTS = ("contiguous", "reversed", "random", "holes", "blocks")
#: Tokens at the beginning of a load that the engine has already: none, some of a block, a chunk and some.
SKIPS = ("none", "part", "chunk")
#: axis -> its values, those of the issue.
AXES: dict[str, tuple[str, ...]] = {
    "layout": tuple(LAYOUTS),
    "dtype": tuple(DTYPES),
    "tokens": TOKENS,
    "slots": SLOTS,
    "block": ("16", "32", "64", "128"),
    "chunk": ("16", "32", "64", "128", "256"),
    "heads": ("1", "2", "3"),
    "skip": SKIPS,
}
PRIME = 211
#: Bytes that each layer's K has at least: LMCache's layerwise connector rounds its buffer, of that size, up to 4 KiB.
LEAST = 8192
Axes = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Cell:
    """One round trip. All values as given on the command line; block, chunk and tokens in tokens."""

    backend: str
    layout: str = "nhd"
    dtype: str = "bfloat16"
    tokens: str = "prime"
    slots: str = "random"
    block: str = "16"
    chunk: str = "64"
    heads: str = "2"
    skip: str = "none"
    layers: int = 3
    head_size: int = 32
    seed: int = 0

    def command(self, *more: str) -> str:
        """What runs this cell and no other."""
        options = [f"--{name.replace('_', '-')} {value}" for name, value in asdict(self).items()]
        return " ".join(["kvfix roundtrip", *options, *more])

    @property
    def count(self) -> int:
        """Tokens. `prime` is a prime number: no multiple of anything."""
        named = {"block": int(self.block), "chunk": int(self.chunk), "prime": PRIME}
        for name, value in named.items():
            if self.tokens.startswith(name):
                return value + int(self.tokens[len(name) :] or 0)
        return int(self.tokens)

    @property
    def skipped(self) -> int:
        """Tokens that a load leaves out; less than there are."""
        wanted = {"none": 0, "part": int(self.block) // 2 + 1, "chunk": int(self.chunk) + int(self.block) // 2}
        return min(wanted[self.skip], self.count - 1)

    def geometry(self) -> Geometry:
        layout, block = LAYOUTS[self.layout], int(self.block)
        heads = 1 if layout.latent else int(self.heads)
        blocks = (4 if self.slots == "holes" else 2) * -(-self.count // block) + 3  # to store from and to load into
        plane = block * heads * self.head_size * DTYPES[self.dtype].itemsize
        blocks = max(blocks, -(-LEAST // plane))
        return Geometry(layout, DTYPES[self.dtype], self.layers, blocks, block, heads, self.head_size)

    def mappings(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot of each token, where it is stored from and where it is loaded to: [tokens] int64 each, without a slot in
        common."""
        slots, tokens = self.geometry().slots, self.count
        if self.slots == "random":
            shuffled = torch.randperm(slots, generator=torch.Generator().manual_seed(self.seed))
            return shuffled[:tokens], shuffled[tokens : 2 * tokens]
        if self.slots == "blocks":  # as the engine has them: the tokens in order in blocks that lie anywhere
            block = int(self.block)
            order = torch.randperm(slots // block, generator=torch.Generator().manual_seed(self.seed))
            shuffled = (order[:, None] * block + torch.arange(block)).flatten()
            return shuffled[:tokens], shuffled[-(-tokens // block) * block :][:tokens]
        step = 2 if self.slots == "holes" else 1
        source = torch.arange(tokens) * step + int(self.block)  # the first block belongs to no request, as in vLLM
        target = source + tokens * step + step // 2
        if self.slots == "reversed":
            source, target = source.flip(0), target.flip(0)
        return source, target


def full(backend: str, axes: Axes) -> list[Cell]:
    """Every combination."""
    return [cell_of(backend, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def pairs(backend: str, axes: Axes, seed: int = 0) -> list[Cell]:
    """Cells in which every value of an axis meets every value of every other: a greedy covering of pairs. The same seed
    gives the same cells."""
    order, draw = list(axes), random.Random(seed)
    choices = [(axis, value) for axis in axes for value in axes[axis]]
    missing = {(one, other) for one, other in itertools.combinations(choices, 2) if one[0] != other[0]}

    def pair(one: tuple[str, str], other: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
        return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)

    def gain(chosen: dict[str, str], axis: str, value: str) -> tuple[int, float]:
        """Missing pairs that this value brings; of equal ones any."""
        return sum(pair(one, (axis, value)) in missing for one in chosen.items()), draw.random()

    cells: list[Cell] = []
    while missing:
        chosen = dict(min(missing))
        rest = [axis for axis in axes if axis not in chosen]
        draw.shuffle(rest)
        for axis in rest:
            chosen[axis] = max(axes[axis], key=partial(gain, chosen, axis))
        missing -= {pair(one, other) for one, other in itertools.combinations(chosen.items(), 2)}
        cells.append(cell_of(backend, chosen))
    return cells


def cell_of(backend: str, values: dict[str, str]) -> Cell:
    return replace(Cell(backend), **values)  # type: ignore[arg-type]
