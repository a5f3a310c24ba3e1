"""Test the code of elements, and compare each layout with the place at which the torch backend reads a head's row."""

from itertools import product

import pytest
import torch

from kvfix_tools.roundtrip import element
from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.backends.torch_copy import layers, paged
from kvfix_tools.roundtrip.cell_check import everywhere
from kvfix_tools.roundtrip.element import FIRST, Identity
from kvfix_tools.roundtrip.layout import DTYPES, LAYOUTS, Geometry


def every_identity(seed: int) -> torch.Tensor:
    """Return the words [rows, 16] of every row: four layers, K and V, 64 slots, 3 heads."""
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (2, 4, 2, 64, 3)))
    return element.rows(Identity(*grid.unbind(1), 0).number(), 16, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_decode_is_the_inverse_of_encode(seed: int) -> None:
    largest = Identity(*((1 << bits) - 1 for bits in element.BITS.values())).number()
    numbers = torch.cat([torch.arange(5000) * 1_000_003, torch.tensor([0, largest])])
    assert torch.equal(element.decode(element.encode(numbers.clone(), seed), seed), numbers)
    assert largest > 0
    who = Identity(2, 31, 1, 12345, 7, 63)
    assert Identity.of(who.number()) == who


def test_no_two_words_are_alike_and_a_seed_changes_all() -> None:
    words = every_identity(0)
    assert len(words.unique()) == words.numel()
    assert not bool((words == every_identity(1)).any())


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "uint8"])
def test_every_kind_of_float_occurs(name: str) -> None:
    """A comparison of floats would miss differences (-0.0 and 0.0) and report false ones (NaN)."""
    held = every_identity(0).view(DTYPES[name]).float()
    assert bool(held.isnan().any())
    assert bool((held < 0).any())
    if DTYPES[name].itemsize < 4:  # too few floats of four bytes for a -0.0
        assert bool(((held == 0) & held.signbit()).any())


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_lies_where_the_torch_backend_reads_it(name: str) -> None:
    heads = 1 if LAYOUTS[name].latent else 2
    geometry = Geometry(LAYOUTS[name], torch.float32, layers=3, blocks=5, block=4, heads=heads, head_size=8)
    region = regions.kv_cache(geometry, torch.device("cpu"), seed=1)
    region.fill(everywhere(FIRST))
    sizes = region.geometry
    of_backend = [paged(tensor, sizes) for tensor in layers(region.typed(), sizes)]
    for at in product(range(3), range(sizes.planes), range(5), range(4), range(sizes.heads)):
        layer, kv, block, offset, head = at
        number = torch.tensor([Identity(FIRST, layer, kv, block * 4 + offset, head, 0).number()])
        wanted = element.rows(number, sizes.row_words, region.seed)[0]
        assert torch.equal(of_backend[layer][block, offset, kv, head], wanted), at
