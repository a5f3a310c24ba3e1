"""Encode the identity of each KV word as the content of the word.

A word is eight bytes of KV. The identity of a word is a number of 63 bits with six fields (`Identity`), such as layer,
slot and head. The elements of one head and slot are a row. A 64-bit bijection maps the identity to the content of the
word. So the contents of two words differ in about half of their bits, and some words are NaN, -0.0 or denormal as
floats. The inverse of the bijection gives the identity of a misplaced word. One element (1 to 4 bytes) cannot hold an
identity.
"""

from typing import Any, NamedTuple

import torch

WORD = 8  # bytes of one word
#: {field: number of bits}, the most significant field first. The sum is 63, so that no identity is negative as int64.
BITS = {"generation": 6, "layer": 10, "kv": 1, "slot": 26, "head": 8, "word": 12}
_SHIFT = {name: sum(list(BITS.values())[place + 1 :]) for place, name in enumerate(BITS)}
#: Generations. STALE marks KV from before the check. FIRST, SECOND and OTHER mark KV that the check writes.
STALE, FIRST, SECOND, OTHER = 0, 1, 2, 3
POISON, HOST_POISON, GUARD = 60, 61, 62
_A, _B = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd, so they have an inverse modulo 2**64
_S1, _S2 = 32, 29


class Identity(NamedTuple):
    """The fields of an identity. word: index of the word in its row. kv: 0 for K (or MLA's latent vector), 1 for V."""

    generation: Any
    layer: Any
    kv: Any
    slot: Any
    head: Any
    word: Any

    def number(self) -> Any:
        return sum(value << _SHIFT[name] for name, value in self._asdict().items())

    @classmethod
    def of(cls, number: Any) -> "Identity":
        return cls(*((number >> _SHIFT[name]) & ((1 << bits) - 1) for name, bits in BITS.items()))


def too_large(layers: int, slots: int, heads: int, words: int) -> str | None:
    """Return an error text if one of these sizes is too large for its field in an identity, else None."""
    for name, size in (("layer", layers), ("slot", slots), ("head", heads), ("word", words)):
        if size > 1 << BITS[name]:
            return f"{size} {name}s are too many: the limit is {1 << BITS[name]}"
    return None


def encode(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the words (int64) for the identities `numbers`. Overwrite `numbers`, because a copy may need gigabytes."""
    numbers.bitwise_xor_(_signed(_seed(seed)))
    for factor, shift in ((_A, _S1), (_B, _S2)):
        numbers.mul_(_signed(factor))
        numbers.bitwise_xor_(_logical_shift(numbers, shift))
    return numbers


def decode(words: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the identity of each word as a number. A word without identity nearly always gives an invalid number."""
    x = words ^ _logical_shift(words, _S2) ^ _logical_shift(words, 2 * _S2)
    x = x * _signed(pow(_B, -1, 1 << 64))
    x ^= _logical_shift(x, _S1)
    x = x * _signed(pow(_A, -1, 1 << 64))
    return x ^ _signed(_seed(seed))


def rows(numbers: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    """Return a tensor [rows, words] with the words of these rows. numbers: the identity of each row's first word."""
    places = torch.arange(words, dtype=torch.int64, device=numbers.device)
    return encode(numbers[:, None] + places[None, :], seed)


def _seed(seed: int) -> int:
    """Map a seed to 62 bits. Different seeds give different words for every identity."""
    return (seed * _A + _B) % (1 << 62)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _logical_shift(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)
