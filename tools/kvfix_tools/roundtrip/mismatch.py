"""What a wrong word is: its class, and in plain text what lies where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from kvfix_tools.roundtrip import element
from kvfix_tools.roundtrip.element import GENERATIONS, GUARD, HOST_POISON, POISON, WORD, Identity
from kvfix_tools.roundtrip.region import Region, WrongWords

#: Bits that may differ in a word that is still called the right one with flipped bits.
FEW_BITS = 4
#: A mismatch in this field alone has a name.
NAMED = {
    "generation": "stale",
    "layer": "wrong layer",
    "kv": "K and V swapped",
    "slot": "wrong slot",
    "head": "wrong head",
    "word": "shifted in its row",
}
#: In the order in which they are tried.
CLASSES = (
    "source changed", "guard band written", "bystander written", "not written", *NAMED.values(), "overwritten",
    "misplaced", "bit flip", "shifted by bytes", "unknown",
)  # fmt: skip


@dataclass
class Finding:
    """One check of one region that found wrong words. `first`: the first of them, in words; `address`: its byte in the
    region. `classes`: words of each class."""

    stage: str
    first: str
    address: int
    classes: Counter[str] = field(default_factory=Counter)

    @property
    def words(self) -> int:
        return sum(self.classes.values())

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {words * WORD} B" for name, words in self.classes.most_common())
        return f"{self.stage}: {self.first} (byte {self.address:#x} of it)\n    {counted}"


def find(region: Region, wrong: list[WrongWords], stage: str, source: bool = False) -> Finding | None:
    """Names and counts what a check of the region has found. source: nothing was to be written there at all."""
    found: Counter[str] = Counter()
    first: tuple[int, str] | None = None
    for part in wrong:
        kinds = classify(region, part, source)
        found.update(CLASSES[kind] for kind in kinds.tolist())
        found.update({"not looked at": part.more} if part.more else {})
        at = int(part.address.argmin())
        if first is None or int(part.address[at]) < first[0]:
            first = int(part.address[at]), describe(region, part, at, CLASSES[int(kinds[at])])
    return Finding(stage, first[1], first[0] * WORD, found) if first else None


def classify(region: Region, wrong: WrongWords, source: bool) -> torch.Tensor:
    """[n]: place in CLASSES of each wrong word."""
    expected, number = Identity.of(wrong.expected), element.decode(wrong.found, region.seed)
    held, known = Identity.of(number), _known(region, number)
    kinds = torch.full_like(wrong.found, CLASSES.index("unknown"))
    kinds[_shifted(region, wrong)] = CLASSES.index("shifted by bytes")
    kinds[_bits(wrong.found ^ _words(region, wrong.expected)) <= FEW_BITS] = CLASSES.index("bit flip")
    kinds[known] = CLASSES.index("misplaced")
    differ = {name: getattr(held, name) != getattr(expected, name) for name in NAMED}
    alone = sum(value.to(torch.int64) for value in differ.values()) == 1
    for name, kind in NAMED.items():
        kinds[known & alone & differ[name]] = CLASSES.index(kind)
    later = known & alone & differ["generation"] & (held.generation > expected.generation)
    kinds[later] = CLASSES.index("overwritten")
    kinds[known & ((held.generation == POISON) | (held.generation == HOST_POISON))] = CLASSES.index("not written")
    kinds[(expected.generation == POISON) | (expected.generation == HOST_POISON)] = CLASSES.index("bystander written")
    if wrong.what == "guard":
        kinds[:] = CLASSES.index("guard band written")
    if source:
        kinds[:] = CLASSES.index("source changed")
    return kinds


def describe(region: Region, wrong: WrongWords, at: int, kind: str) -> str:
    """`layer 3 V, slot 21 holds layer 4 K, slot 5; ...`"""
    number = element.decode(wrong.found[at : at + 1], region.seed)
    held, known = Identity.of(int(number)), bool(_known(region, number))
    expected = Identity.of(int(wrong.expected[at]))
    if wrong.what == "guard":
        here = "the guard band"
    else:
        row = region.locate(int(wrong.address[at]))
        slot = "token" if "token" in row else "slot"
        here = f"{_layer(region, row['layer'], row['kv'])}, {slot} {row[slot]}"
        here += f", head {row['head']}" if region.geometry.heads > 1 else ""
    should = place(region, expected)
    if not known:
        flipped = int(wrong.found[at] ^ _words(region, wrong.expected[at : at + 1])[0]) & ((1 << 64) - 1)
        what = f"differs in bits {flipped:#x}" if kind == "bit flip" else "holds what is nobody's"
        return f"{kind}: {here} {what}; it should hold {should}"
    holds = place(region, held)
    if held.generation < expected.generation < POISON:
        holds += " of an earlier generation"
    elif expected.generation < held.generation < POISON:
        holds += " of a later generation"
    if kind == "shifted in its row":
        holds += f", {held.word * WORD} bytes into the row instead of {expected.word * WORD}"
    return f"{kind}: {here} holds {holds}; it should hold {should}"


def place(region: Region, who: Identity) -> str:
    """In words."""
    if who.generation in (POISON, HOST_POISON, GUARD):
        return f"the {GENERATIONS[who.generation]} that was there"
    head = f", head {who.head}" if region.geometry.heads > 1 else ""
    return f"{_layer(region, who.layer, who.kv)}, slot {who.slot}{head}"


def _layer(region: Region, layer: int, kv: int) -> str:
    return f"layer {layer}" + ("" if region.geometry.layout.latent else f" {'KV'[kv]}")


def _words(region: Region, numbers: torch.Tensor) -> torch.Tensor:
    return element.encode(numbers.clone(), region.seed)


def _known(region: Region, numbers: torch.Tensor) -> torch.Tensor:
    """Are these identities that exist here? A word that is none is one by chance in 2**30 cases or less."""
    who, sizes = Identity.of(numbers), region.geometry
    generation = (who.generation <= element.OTHER) | ((who.generation >= POISON) & (who.generation <= GUARD))
    return (
        (numbers >= 0) & generation & (who.layer < sizes.layers) & (who.kv < sizes.planes)
        & ((who.slot < sizes.slots) | (who.generation == GUARD)) & (who.head < sizes.heads)
        & ((who.word < sizes.row_words) | (who.generation == GUARD))
    )  # fmt: skip


def _shifted(region: Region, wrong: WrongWords) -> torch.Tensor:
    """Does a known word begin within this one, at a byte that is not a word's first?"""
    next_one = (wrong.address + 1).clamp(max=len(region.words) - 1)
    behind = region.words[next_one.to(region.words.device)].cpu()
    found = torch.zeros_like(wrong.found, dtype=torch.bool)
    for by in range(8, 64, 8):
        low = (wrong.found >> by) & ((1 << (64 - by)) - 1)
        found |= _known(region, element.decode(low | (behind << (64 - by)), region.seed))
    return found


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bits that are set in each word."""
    return sum(((x >> bit) & 1 for bit in range(64)), torch.zeros_like(x))
