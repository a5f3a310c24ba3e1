"""The definition of each layout, and another statement of it: where vLLM's attention reads a head's row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.backends.torch_copy import layers, paged
from kvfix_tools.roundtrip.cell_check import everywhere
from kvfix_tools.roundtrip.element import FIRST
from kvfix_tools.roundtrip.layout import LAYOUTS, Geometry

HS = 8
Read = Callable[[list[torch.Tensor], int, int, int, int, int], torch.Tensor]

#: The row of layer n, k (0) or v (1), block b, offset o, head h, in the engine's tensors t.
READ: dict[str, Read] = {
    "nhd": lambda t, n, k, b, o, h: t[n][k, b, o, h],
    "nhd-block-first": lambda t, n, k, b, o, h: t[n][b, k, o, h],
    "hnd": lambda t, n, k, b, o, h: t[n][k, b, h, o],
    "hnd-block-first": lambda t, n, k, b, o, h: t[n][b, k, h, o],
    "packed": lambda t, n, k, b, o, h: t[n][b, o, h, k * HS : (k + 1) * HS],
    "packed-hnd": lambda t, n, k, b, o, h: t[n][b, h, o, k * HS : (k + 1) * HS],
    "packed-cpu": lambda t, n, k, b, o, h: t[n][b, h].flatten()[(k * 4 + o) * HS : (k * 4 + o + 1) * HS],
    "kv-inside": lambda t, n, k, b, o, h: t[n][b, o, k, h * HS : (h + 1) * HS],
    "mla": lambda t, n, k, b, o, h: t[n][b, o],
    "one-tensor": lambda t, n, k, b, o, h: t[0][n, k, b, o, h],
    "block-outermost": lambda t, n, k, b, o, h: t[0][b, n, k, o, h],
    "packed-pool": lambda t, n, k, b, o, h: t[0][b, n, o, h, k * HS : (k + 1) * HS],
}  # fmt: skip


def cache(name: str, heads: int = 2) -> regions.Region:
    heads = 1 if LAYOUTS[name].latent else heads
    geometry = Geometry(LAYOUTS[name], torch.float32, layers=3, blocks=5, block=4, heads=heads, head_size=HS)
    region = regions.kv_cache(geometry, torch.device("cpu"), seed=1)
    region.fill(everywhere(FIRST))
    return region


def row(region: regions.Region, layer: int, kv: int, slot: int, head: int) -> torch.Tensor:
    from kvfix_tools.roundtrip import element

    number = torch.tensor([element.Identity(FIRST, layer, kv, slot, head, 0).number()])
    return element.rows(number, region.geometry.row_words, region.seed)[0].view(torch.float32)


def test_every_layout_is_stated_here() -> None:
    assert READ.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_lies_where_attention_reads_it(name: str) -> None:
    region = cache(name)
    sizes, tensors = region.geometry, region.typed()
    for at in product(range(3), range(sizes.planes), range(5), range(4), range(sizes.heads)):
        layer, kv, block, offset, head = at
        wanted = row(region, layer, kv, block * 4 + offset, head)
        assert torch.equal(READ[name](tensors, *at).view(torch.int32), wanted.view(torch.int32)), at


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_torch_backend_reads_the_same(name: str) -> None:
    region = cache(name)
    sizes, tensors = region.geometry, region.typed()
    for layer, tensor in enumerate(layers(tensors, sizes)):
        held = paged(tensor, sizes)
        for at in product(range(5), range(4), range(sizes.planes), range(sizes.heads)):
            block, offset, kv, head = at
            wanted = READ[name](tensors, layer, kv, block, offset, head)
            assert torch.equal(held[at].view(torch.int32), wanted.view(torch.int32)), (layer, at)


def test_two_kv_heads_make_two_layouts_of_one_shape() -> None:
    """LMCache PR 4467: nothing about the tensor tells them apart."""
    packed, inside = cache("packed"), cache("kv-inside")
    assert packed.geometry.tensor_shape() == inside.geometry.tensor_shape() == (5, 4, 2, 2 * HS)
    assert not torch.equal(packed.words, inside.words)
