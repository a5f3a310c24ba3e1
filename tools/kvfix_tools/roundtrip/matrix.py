"""The test matrix: a cell is one test case with one value for each axis. `pairs` selects a small number of cells."""

import itertools
import random
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kvfix_tools.roundtrip.layout import DTYPES, LAYOUTS, Geometry

#: {axis: its values}. tokens: number of tokens, or a name for a number (Cell.count). skip: how many tokens a load skips
#: at the start, because the engine already has their KV (none, a part of a block, or more than a chunk).
AXES: dict[str, tuple[str, ...]] = {
    "layout": tuple(LAYOUTS),
    "dtype": tuple(DTYPES),
    "tokens": ("1", "block-1", "block", "block+1", "chunk-1", "chunk", "chunk+1", "prime"),
    "slots": ("contiguous", "reversed", "random", "holes", "blocks"),
    "block": ("16", "32", "64", "128"),
    "chunk": ("16", "32", "64", "128", "256"),
    "heads": ("1", "2", "3"),
    "skip": ("none", "part", "chunk"),
}
PRIME = 211
#: Minimum bytes of K in a layer. LMCache's layerwise buffer is as large as a layer, and allocates multiples of 4 KiB.
LEAST = 8192
Axes = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Cell:
    """One test case. Each field is the value of a command-line option. block, chunk: number of tokens."""

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
        options = [f"--{name.replace('_', '-')} {value}" for name, value in asdict(self).items()]
        return " ".join(["kvfix roundtrip", *options, *more])

    @property
    def count(self) -> int:
        """Number of tokens. `prime` is a prime number, so it is no multiple of a block or a chunk."""
        for name, value in {"block": int(self.block), "chunk": int(self.chunk), "prime": PRIME}.items():
            if self.tokens.startswith(name):
                return value + int(self.tokens[len(name) :] or 0)
        return int(self.tokens)

    @property
    def skipped(self) -> int:
        """Number of tokens that a load skips, always less than `count`."""
        wanted = {"none": 0, "part": int(self.block) // 2 + 1, "chunk": int(self.chunk) + int(self.block) // 2}
        return min(wanted[self.skip], self.count - 1)

    def geometry(self) -> Geometry:
        layout, block = LAYOUTS[self.layout], int(self.block)
        heads = 1 if layout.latent else int(self.heads)
        blocks = (4 if self.slots == "holes" else 2) * -(-self.count // block) + 3  # half of the blocks are for loads
        plane = block * heads * self.head_size * DTYPES[self.dtype].itemsize
        blocks = max(blocks, -(-LEAST // plane))
        return Geometry(layout, DTYPES[self.dtype], self.layers, blocks, block, heads, self.head_size)

    def mappings(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots to store from and the slots to load into: two int64 tensors [tokens] with no common slot."""
        slots, tokens = self.geometry().slots, self.count
        if self.slots == "random":
            shuffled = torch.randperm(slots, generator=torch.Generator().manual_seed(self.seed))
            return shuffled[:tokens], shuffled[tokens : 2 * tokens]
        if self.slots == "blocks":  # as in an engine: the blocks are shuffled, but the tokens of a block stay in order
            block = int(self.block)
            order = torch.randperm(slots // block, generator=torch.Generator().manual_seed(self.seed))
            shuffled = (order[:, None] * block + torch.arange(block)).flatten()
            return shuffled[:tokens], shuffled[-(-tokens // block) * block :][:tokens]
        step = 2 if self.slots == "holes" else 1
        source = torch.arange(tokens) * step + int(self.block)  # skip the first block, which vLLM gives to no request
        target = source + tokens * step + step // 2
        if self.slots == "reversed":
            source, target = source.flip(0), target.flip(0)
        return source, target


def pairs(backend: str, axes: Axes, seed: int = 0) -> list[Cell]:
    """Return cells that cover each pair of values of two different axes. The search is greedy. The seed breaks ties."""
    order, draw = list(axes), random.Random(seed)
    choices = [(axis, value) for axis in axes for value in axes[axis]]
    missing = {(one, other) for one, other in itertools.combinations(choices, 2) if one[0] != other[0]}

    def pair(one: tuple[str, str], other: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
        return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)

    def gain(chosen: dict[str, str], axis: str, value: str) -> tuple[int, float]:
        """Return the number of missing pairs that this value adds, and a random number to break ties."""
        return sum(pair(one, (axis, value)) in missing for one in chosen.items()), draw.random()

    cells: list[Cell] = []
    while missing:
        chosen = dict(min(missing))
        rest = [axis for axis in axes if axis not in chosen]
        draw.shuffle(rest)
        for axis in rest:
            chosen[axis] = max(axes[axis], key=partial(gain, chosen, axis))
        missing -= {pair(one, other) for one, other in itertools.combinations(chosen.items(), 2)}
        cells.append(Cell(backend, **chosen))  # type: ignore[arg-type]
    return cells
