"""Memory whose every word is known: the KV cache, or the host buffers, each tensor between guard bands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from kvfix_tools.roundtrip import element
from kvfix_tools.roundtrip.element import GUARD, WORD, Identity
from kvfix_tools.roundtrip.layout import Geometry, coordinates, count

#: Words of a guard band (4 KiB), before, between and behind the tensors: alignment of what lies there is kept.
BAND = 512
#: Rows that are made or compared at once: bounds the memory needed besides the region.
AT_ONCE = 1 << 20
#: Wrong words of one part that are kept to be named; the rest are counted.
KEPT = 1 << 16

Coordinates = dict[str, torch.Tensor]
#: Coordinates of rows (`slot` among them, or `token`) -> their identities; `word` is 0.
Expected = Callable[[Coordinates], Identity]


@dataclass
class Section:
    """One tensor of a region: `rows` rows of it from word `start` on. `fixed`: coordinates that all its rows share."""

    start: int
    rows: int
    axes: tuple[str, ...]
    sizes: dict[str, int]
    fixed: dict[str, int]

    def coordinates(self, first: int, last: int, device: torch.device) -> Coordinates:
        places = torch.arange(first, last, dtype=torch.int64, device=device)
        found = coordinates(self.axes, self.sizes, places)
        nothing = torch.zeros_like(places)
        for name in ("layer", "kv", "head"):
            found.setdefault(name, nothing)
        found.update({name: nothing + value for name, value in self.fixed.items()})
        first = found.pop("first", None)
        slot = found.pop("block") * self.sizes["offset"] + found.pop("offset") if "offset" in found else found["token"]
        found["slot" if first is None else "token"] = slot if first is None else slot + first
        return found


@dataclass
class WrongWords:
    """Words that are not what they should be. All tensors [n], int64, on the CPU."""

    what: str
    address: torch.Tensor  # in words, from the beginning of the region
    expected: torch.Tensor  # numbers of identities
    found: torch.Tensor  # words
    more: int = 0  # wrong words besides these


@dataclass
class Region:
    """`words`: the whole memory, guard bands included, as int64. `device`: where it is looked at."""

    words: torch.Tensor
    sections: list[Section]
    geometry: Geometry
    device: torch.device
    seed: int
    name: str
    verified: int = field(default=0)  # bytes that compare() has looked at, in all

    def tensors(self) -> list[torch.Tensor]:
        """The rows of each section: [rows, words of a row], views."""
        size = self.geometry.row_words
        return [
            self.words[section.start : section.start + section.rows * size].view(-1, size) for section in self.sections
        ]

    def typed(self) -> list[torch.Tensor]:
        """The engine's tensors (of the KV cache), views."""
        return [rows.view(self.geometry.dtype).view(self.geometry.tensor_shape()) for rows in self.tensors()]

    def coordinates(self) -> Coordinates:
        """Of all rows, the tensors one after the other."""
        parts = [section.coordinates(0, section.rows, self.words.device) for section in self.sections]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def fill(self, expected: Expected, guards: bool = True) -> None:
        for section, first, last, into in self._parts():
            into.copy_(self._rows(section, expected, first, last))
        if guards:
            for start, end in self._bands():
                self.words[start:end] = self._band(start, end).to(self.words.device)

    def compare(self, expected: Expected) -> Iterator[WrongWords]:
        """Every word of the region, guard bands included."""
        for section, first, last, rows in self._parts():
            right = self._rows(section, expected, first, last)
            held = rows.to(self.device, non_blocking=True)
            self.verified += rows.numel() * WORD
            if not torch.equal(held, right):
                at = (held != right).nonzero()
                more, at = max(0, len(at) - KEPT), at[:KEPT]
                numbers = element.decode(right[at[:, 0], at[:, 1]], self.seed)
                address = section.start + (first + at[:, 0]) * self.geometry.row_words + at[:, 1]
                yield WrongWords("content", address.cpu(), numbers.cpu(), held[at[:, 0], at[:, 1]].cpu(), more)
        for start, end in self._bands():
            held, right = self.words[start:end].to(self.device), self._band(start, end)
            if not torch.equal(held, right):
                at = (held != right).nonzero()[:, 0]
                numbers = element.decode(right[at], self.seed)
                yield WrongWords("guard", (start + at).cpu(), numbers.cpu(), held[at].cpu())

    def locate(self, address: int) -> dict[str, int]:
        """Coordinates of the row that a word lies in. Raises ValueError in a guard band."""
        for section in self.sections:
            row = (address - section.start) // self.geometry.row_words
            if 0 <= row < section.rows:
                found = section.coordinates(row, row + 1, torch.device("cpu"))
                return {name: int(value) for name, value in found.items()}
        raise ValueError(f"word {address} is in no row")

    def _parts(self) -> Iterator[tuple[Section, int, int, torch.Tensor]]:
        for section, rows in zip(self.sections, self.tensors(), strict=True):
            for first in range(0, section.rows, AT_ONCE):
                last = min(first + AT_ONCE, section.rows)
                yield section, first, last, rows[first:last]

    def _rows(self, section: Section, expected: Expected, first: int, last: int) -> torch.Tensor:
        numbers = expected(section.coordinates(first, last, self.device)).number()
        return element.rows(numbers, self.geometry.row_words, self.seed)

    def _bands(self) -> Iterator[tuple[int, int]]:
        at = 0
        for section in self.sections:
            yield at, section.start
            at = section.start + section.rows * self.geometry.row_words
        yield at, len(self.words)

    def _band(self, start: int, end: int) -> torch.Tensor:
        """Each word of a guard band is its own: what is copied from one to another is seen."""
        places = torch.arange(start, end, dtype=torch.int64, device=self.device)
        word = places % (1 << element.BITS["word"])
        slot = (places // (1 << element.BITS["word"])) % (1 << element.BITS["slot"])
        nothing = torch.zeros_like(places)
        return element.encode(Identity(nothing + GUARD, nothing, nothing, slot, nothing, word).number(), self.seed)


def kv_cache(geometry: Geometry, device: torch.device, seed: int) -> Region:
    """The paged memory of an engine: one tensor, or one for each layer."""
    axes = geometry.layout.axes
    parts = [(geometry.sizes(), layer) for layer in _layers(geometry, axes)]
    return _region("KV cache", geometry, axes, parts, device, seed)


def host(geometry: Geometry, axes: str, chunk: int, tokens: int, device: torch.device, seed: int) -> Region:
    """Host buffers, one for each chunk of `chunk` tokens, the last one as short as it has to be. `axes`: outermost
    first; without `layer`, each layer of a chunk is a buffer of its own. Pinned where there is a GPU."""
    order = tuple(axis for axis in axes.split() if axis not in ("kv", "head") or not geometry.layout.latent)
    parts = [
        (geometry.sizes(min(chunk, tokens - first)), {**layer, "first": first})
        for first in range(0, tokens, chunk)
        for layer in _layers(geometry, order)
    ]
    return _region("host", geometry, order, parts, device, seed)


def host_blocks(geometry: Geometry, blocks: int, device: torch.device, seed: int) -> Region:
    """Host buffers for whole blocks, as vLLM's own offload has them: the tensors of the KV cache, with fewer blocks."""
    axes, sizes = geometry.layout.axes, {**geometry.sizes(), "block": blocks}
    parts = [(sizes, {**layer, "first": 0}) for layer in _layers(geometry, axes)]
    return _region("host", geometry, axes, parts, device, seed)


def _layers(geometry: Geometry, axes: tuple[str, ...]) -> list[dict[str, int]]:
    """What the rows of each tensor have in common: their layer, if it is not one of the axes."""
    return [{}] if "layer" in axes else [{"layer": number} for number in range(geometry.layers)]


def _region(
    name: str, geometry: Geometry, axes: tuple[str, ...], parts: list[tuple[dict[str, int], dict[str, int]]],
    device: torch.device, seed: int,
) -> Region:  # fmt: skip
    sections, at = [], BAND
    for sizes, fixed in parts:
        rows = count(axes, sizes)
        sections.append(Section(at, rows, axes, sizes, fixed))
        at += -(-rows * geometry.row_words // BAND) * BAND + BAND
    if name == "host":
        words = torch.empty(at, dtype=torch.int64, pin_memory=device.type == "cuda")
    else:
        words = torch.empty(at, dtype=torch.int64, device=device)
    return Region(words, sections, geometry, device, seed, name)
