"""Define each layout of KV in memory by the order of its axes.

A *row* has the elements of one head for one token, either of K or of V. All layouts of vLLM and LMCache keep a row
contiguous, so a layout is an order of rows. kvfix fills a row with values that depend on the layer, the slot, the head,
and whether the row is of K or V.
"""

import math
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip.element import WORD

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}


class Layout(NamedTuple):
    """A layout. If `layer` is an axis, one tensor holds all layers. If not, each layer has its own tensor."""

    name: str
    axes: tuple[str, ...]  # axes in the order of memory, outermost first, without the elements of a row
    tensor: tuple[str, ...]  # axes of the engine's tensor. `a*b` is one axis that joins a and b

    @property
    def one_tensor(self) -> bool:
        return "layer" in self.axes

    @property
    def latent(self) -> bool:
        """True for MLA, which has one latent vector for each token instead of K and V for each head."""
        return "kv" not in self.axes

    @property
    def fused(self) -> bool:
        """True if the last axis of the tensor joins K and V."""
        return "kv*element" in self.tensor


def _layout(name: str, axes: str, tensor: str = "") -> Layout:
    return Layout(name, tuple(axes.split()), tuple((tensor or f"{axes} element").split()))


LAYOUTS = {
    layout.name: layout
    for layout in (
        _layout("nhd", "kv block offset head"),
        _layout("nhd-block-first", "block kv offset head"),
        _layout("hnd", "kv block head offset"),
        _layout("hnd-block-first", "block kv head offset"),
        # The V row of a head follows the K row of this head (vLLM 0.26 and later, PR 44455).
        _layout("packed", "block offset head kv", "block offset head kv*element"),
        _layout("packed-hnd", "block head offset kv", "block head offset kv*element"),
        # On the CPU, vLLM uses the shape of `packed-hnd`, but all K rows of a head come before the head's V rows.
        _layout("packed-cpu", "block head kv offset", "block head offset kv*element"),
        # With two KV heads, `kv-inside` has the shape of `packed`, but another order of rows (LMCache PR 4467).
        _layout("kv-inside", "block offset kv head", "block offset kv head*element"),
        _layout("mla", "block offset"),
        _layout("one-tensor", "layer kv block offset head"),
        _layout("block-outermost", "block layer kv offset head"),
        # Hybrid models and vLLM's layout BLNHC use this order. KV of other layers lies between two blocks of a layer.
        _layout("packed-pool", "block layer offset head kv", "block layer offset head kv*element"),
    )
}


class Geometry(NamedTuple):
    """The sizes of one KV cache. blocks: number of blocks. block: tokens of a block. head_size: elements of a head."""

    layout: Layout
    dtype: torch.dtype
    layers: int
    blocks: int
    block: int
    heads: int
    head_size: int

    @property
    def planes(self) -> int:
        """Number of planes: 2 for K and V, or 1 for MLA's latent vector."""
        return 1 if self.layout.latent else 2

    @property
    def slots(self) -> int:
        return self.blocks * self.block

    @property
    def row_bytes(self) -> int:
        return self.head_size * int(self.dtype.itemsize)

    @property
    def row_words(self) -> int:
        if self.row_bytes % WORD:
            raise ValueError(f"a row has {self.row_bytes} bytes, not a multiple of {WORD}. Give another --head-size")
        return self.row_bytes // WORD

    def token_bytes(self, tokens: int) -> int:
        return tokens * self.layers * self.planes * self.heads * self.row_bytes

    def sizes(self, chunk: int = 0) -> dict[str, int]:
        """Return {axis: size}. chunk: number of tokens in a host buffer, which is the size of the axis `token`."""
        return {
            "layer": self.layers, "kv": self.planes, "block": self.blocks, "offset": self.block, "head": self.heads,
            "token": chunk,
        }  # fmt: skip

    def tensor_shape(self) -> tuple[int, ...]:
        sizes = {**self.sizes(), "element": self.head_size}
        return tuple(math.prod(sizes[axis] for axis in group.split("*")) for group in self.layout.tensor)
