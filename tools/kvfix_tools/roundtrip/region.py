"""A region is memory with known words: the KV cache or the host buffers. Each tensor is between two guard bands."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip import element
from kvfix_tools.roundtrip.element import GUARD, WORD, Identity
from kvfix_tools.roundtrip.layout import Geometry

BAND = 512  # number of words in one guard band. Its 4 KiB keep the next tensor aligned
AT_ONCE = 1 << 20  # number of rows to make or compare at once. More rows would need more memory
KEPT = 1 << 16  # Maximum number of wrong words to classify in AT_ONCE rows. Further wrong words are only counted.
Coordinates = dict[str, torch.Tensor]
#: A function that takes rows' coordinates (with `slot` or `token`) and returns the identity of each row's first word.
Expected = Callable[[Coordinates], Identity]


class Section(NamedTuple):
    """One tensor of a region. The tensor begins at word `start` of the region."""

    start: int
    axes: tuple[str, ...]
    sizes: dict[str, int]
    fixed: dict[str, int]  # {"layer": the layer of all rows} if layer is not an axis, else {}
    token: int | None  # the first token of a host buffer; None in a KV cache

    @property
    def rows(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes)

    def coordinates(self, first: int, last: int, device: torch.device) -> Coordinates:
        """Return {axis: coordinate of each row} for rows `first` to `last` - 1, which are numbered in memory order."""
        rows = torch.arange(first, last, dtype=torch.int64, device=device)
        nothing, inner = torch.zeros_like(rows), 1
        found = dict.fromkeys(("layer", "kv", "head"), nothing)
        for axis in reversed(self.axes):
            found[axis] = (rows // inner) % self.sizes[axis]
            inner *= self.sizes[axis]
        found |= {axis: nothing + value for axis, value in self.fixed.items()}
        place = found.pop("block") * self.sizes["offset"] + found.pop("offset") if "block" in found else found["token"]
        found["slot" if self.token is None else "token"] = place + (self.token or 0)
        return found


class WrongWords(NamedTuple):
    """The wrong words in one part of a region. guard: True for a guard band. All tensors are [n], int64, on the CPU."""

    guard: bool
    address: torch.Tensor  # in words, from the beginning of the region
    expected: torch.Tensor  # identities as numbers
    found: torch.Tensor  # the wrong words
    more: int  # number of wrong words that the tensors leave out


@dataclass
class Region:
    """words: the memory of the region with its guard bands, as int64. device: the device that compares the words."""

    words: torch.Tensor
    sections: list[Section]
    geometry: Geometry
    device: torch.device
    seed: int
    name: str
    verified: int = 0  # number of bytes that compare() has checked

    def tensors(self) -> list[torch.Tensor]:
        """Return a view of each section, with the shape [rows, words of a row]."""
        size = self.geometry.row_words
        return [self.words[each.start :][: each.rows * size].view(-1, size) for each in self.sections]

    def typed(self) -> list[torch.Tensor]:
        return [rows.view(self.geometry.dtype).view(self.geometry.tensor_shape()) for rows in self.tensors()]

    def fill(self, expected: Expected) -> None:
        for _, start, right in self._parts(expected):
            self.words[start : start + len(right)].copy_(right)

    def compare(self, expected: Expected) -> Iterator[WrongWords]:
        """Compare every word of the region and its guard bands, and yield the wrong words."""
        for guard, start, right in self._parts(expected):
            held = self.words[start : start + len(right)].to(self.device, non_blocking=True)
            self.verified += len(right) * WORD
            if not torch.equal(held, right):
                at = (held != right).nonzero()[:, 0]
                more, at = max(0, len(at) - KEPT), at[:KEPT]
                numbers = element.decode(right[at], self.seed)
                yield WrongWords(guard, (start + at).cpu(), numbers.cpu(), held[at].cpu(), more)

    def locate(self, address: int) -> dict[str, int]:
        """Return the coordinates of the row with the word `address`. Raise ValueError for a word of a guard band."""
        for section in self.sections:
            row = (address - section.start) // self.geometry.row_words
            if 0 <= row < section.rows:
                found = section.coordinates(row, row + 1, torch.device("cpu"))
                return {name: int(value) for name, value in found.items()}
        raise ValueError(f"word {address} is in no row")

    def _parts(self, expected: Expected) -> Iterator[tuple[bool, int, torch.Tensor]]:
        """Yield (True for a guard band, index of the first word, expected words) for each part of the region."""
        size, end = self.geometry.row_words, 0
        for section in self.sections:
            yield True, end, self._band(end, section.start)
            for first in range(0, section.rows, AT_ONCE):
                at = section.coordinates(first, min(first + AT_ONCE, section.rows), self.device)
                right = element.rows(expected(at).number(), size, self.seed)
                yield False, section.start + first * size, right.flatten()
            end = section.start + section.rows * size
        yield True, end, self._band(end, len(self.words))

    def _band(self, start: int, end: int) -> torch.Tensor:
        """Return the words of a guard band. All words differ, so that kvfix detects a copy between two guard bands."""
        places = torch.arange(start, end, dtype=torch.int64, device=self.device)
        slot, word = places >> element.BITS["word"], places % (1 << element.BITS["word"])
        return element.encode(Identity(GUARD, 0, 0, slot % (1 << element.BITS["slot"]), 0, word).number(), self.seed)


def make(
    name: str, geometry: Geometry, axes: tuple[str, ...], parts: Sequence[tuple[dict[str, int], int | None]],
    device: torch.device, seed: int,
) -> Region:  # fmt: skip
    """Make a region. parts: (sizes, first token) of each tensor. If `axes` lacks `layer`, each layer has all parts."""
    sections, at = [], BAND
    layers: list[dict[str, int]] = [{}] if "layer" in axes else [{"layer": number} for number in range(geometry.layers)]
    for sizes, token in parts:
        for layer in layers:
            sections.append(Section(at, axes, sizes, layer, token))
            at += -(-sections[-1].rows * geometry.row_words // BAND) * BAND + BAND
    place = {"pin_memory": device.type == "cuda"} if name == "host" else {"device": device}
    return Region(torch.empty(at, dtype=torch.int64, **place), sections, geometry, device, seed, name)
