"""The element code: it is a bijection, and says who is who."""

from __future__ import annotations

import pytest
import torch

from kvfix_tools.roundtrip import element
from kvfix_tools.roundtrip.element import Identity
from kvfix_tools.roundtrip.layout import DTYPES


def every_identity(seed: int) -> torch.Tensor:
    """[rows, 16] words: four layers, K and V, 64 slots, 3 heads."""
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (2, 4, 2, 64, 3)))
    return element.rows(Identity(*grid.unbind(1), 0).number(), 16, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_decode_is_the_inverse_of_encode(seed: int) -> None:
    largest = Identity(*((1 << bits) - 1 for bits in element.BITS.values())).number()
    numbers = torch.cat([torch.arange(5000) * 1_000_003, torch.tensor([0, largest])])
    assert torch.equal(element.decode(element.encode(numbers.clone(), seed), seed), numbers)
    assert largest > 0


def test_identity_of_a_number() -> None:
    who = Identity(2, 31, 1, 12345, 7, 63)
    assert Identity.of(who.number()) == who


def test_no_two_words_are_alike_and_a_seed_changes_all() -> None:
    words = every_identity(0)
    assert len(words.unique()) == words.numel()
    assert not bool((words == every_identity(1)).any())


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "uint8"])
def test_every_kind_of_float_occurs(name: str) -> None:
    """NaN and -0.0 would hide a difference, or show one that is none, if floats were compared."""
    held = every_identity(0).view(DTYPES[name]).float()
    assert bool(held.isnan().any())
    assert bool((held < 0).any())
    if DTYPES[name].itemsize < 4:  # of four bytes there are too few here for such a rare one
        assert bool(((held == 0) & held.signbit()).any())


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert element.too_large(80, 1 << 20, 128, 512) is None
    assert "2000 layers" in str(element.too_large(2000, 1, 1, 1))
