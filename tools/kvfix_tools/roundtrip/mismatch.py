"""Classify the wrong words (8 bytes each) of a region of memory, and describe the first wrong word as text."""

from collections import Counter
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip.element import GUARD, HOST_POISON, OTHER, POISON, WORD, Identity, decode, encode
from kvfix_tools.roundtrip.region import Region, WrongWords

FEW_BITS = 4  # A word with at most this number of wrong bits is a bit flip
#: {field of the identity: class of a word that is wrong in this field only}
NAMED = {
    "generation": "stale",
    "layer": "wrong layer",
    "kv": "K and V swapped",
    "slot": "wrong slot",
    "head": "wrong head",
    "word": "shifted in its row",
}
CLASSES = (
    "source changed", "guard band written", "other slot written", "not written", *NAMED.values(), "overwritten",
    "misplaced", "bit flip", "shifted by bytes", "unknown",
)  # fmt: skip
_POISONS = {POISON: "poison", HOST_POISON: "host poison", GUARD: "guard band"}


class Mismatch(NamedTuple):
    stage: str
    first: str  # text about the first wrong word
    address: int  # offset of the first wrong word in the region, in bytes
    classes: Counter[str]  # number of words of each class

    @property
    def words(self) -> int:
        return sum(self.classes.values())

    def __str__(self) -> str:
        counted = ", ".join(f"{name} {words * WORD} B" for name, words in self.classes.most_common())
        return f"{self.stage}: {self.first} (byte {self.address:#x} of the region)\n    {counted}"


def find(region: Region, wrong: list[WrongWords], stage: str, source: bool = False) -> Mismatch | None:
    """Classify and count the wrong words of a region. source: True if the copy may only read the region."""
    found, first = Counter[str](), ""
    for part in wrong:  # in the order of addresses
        kinds = classify(region, part, source)
        found.update(CLASSES[kind] for kind in kinds.tolist())
        found.update({"not classified": part.more} if part.more else {})
        first = first or describe(region, part, CLASSES[int(kinds[0])])
    return Mismatch(stage, first, int(wrong[0].address[0]) * WORD, found) if wrong else None


def classify(region: Region, wrong: WrongWords, source: bool) -> torch.Tensor:
    """Return an index in CLASSES for each wrong word. If several classes match, the last call of `name` wins."""
    expected, number = Identity.of(wrong.expected), decode(wrong.found, region.seed)
    held, known = Identity.of(number), _known(region, number)
    kinds = torch.full_like(wrong.found, CLASSES.index("unknown"))

    def name(kind: str, where: torch.Tensor | slice) -> None:
        kinds[where] = CLASSES.index(kind)

    name("shifted by bytes", _shifted(region, wrong))
    flipped = wrong.found ^ _words(region, wrong.expected)
    name("bit flip", sum((flipped >> bit) & 1 for bit in range(64)) <= FEW_BITS)
    name("misplaced", known)
    differ = {field: getattr(held, field) != getattr(expected, field) for field in NAMED}
    alone = known & (torch.stack(list(differ.values())).sum(0) == 1)
    for field, kind in NAMED.items():
        name(kind, alone & differ[field])
    name("overwritten", alone & (held.generation > expected.generation))
    name("not written", known & _poisoned(held))
    name("other slot written", _poisoned(expected))
    if wrong.guard:
        name("guard band written", slice(None))
    if source:
        name("source changed", slice(None))
    return kinds


def describe(region: Region, wrong: WrongWords, kind: str) -> str:
    """Describe the first wrong word, for example: `wrong slot: layer 3 V, slot 21 holds layer 3 V, slot 5; ...`"""
    number = decode(wrong.found[:1], region.seed)
    held, expected = Identity.of(int(number)), Identity.of(int(wrong.expected[0]))
    if wrong.guard:
        here = "the guard band"
    else:
        row = region.locate(int(wrong.address[0]))
        slot = "token" if "token" in row else "slot"
        here = _place(region, row["layer"], row["kv"], f"{slot} {row[slot]}", row["head"])
    should = _who(region, expected)
    if not _known(region, number):
        flipped = int(wrong.found[0] ^ _words(region, wrong.expected[:1])[0]) & ((1 << 64) - 1)
        what = f"differs in bits {flipped:#x}" if kind == "bit flip" else "holds a word that kvfix did not write"
        return f"{kind}: {here} {what}; it should hold {should}"
    holds = _who(region, held)
    if held.generation < expected.generation < POISON:
        holds += " of an earlier generation"
    elif expected.generation < held.generation < POISON:
        holds += " of a later generation"
    if kind == "shifted in its row":
        holds += f", {held.word * WORD} bytes into the row instead of {expected.word * WORD}"
    return f"{kind}: {here} holds {holds}; it should hold {should}"


def _who(region: Region, who: Identity) -> str:
    if who.generation in _POISONS:
        return f"the {_POISONS[who.generation]} that kvfix wrote before the copy"
    return _place(region, who.layer, who.kv, f"slot {who.slot}", who.head)


def _place(region: Region, layer: int, kv: int, slot: str, head: int) -> str:
    plane = "" if region.geometry.layout.latent else f" {'KV'[kv]}"
    return f"layer {layer}{plane}, {slot}" + (f", head {head}" if region.geometry.heads > 1 else "")


def _poisoned(who: Identity) -> torch.Tensor:
    return (who.generation == POISON) | (who.generation == HOST_POISON)


def _words(region: Region, numbers: torch.Tensor) -> torch.Tensor:
    return encode(numbers.clone(), region.seed)


def _known(region: Region, numbers: torch.Tensor) -> torch.Tensor:
    """Return True for each possible identity. With 32 layers and 8 heads, 1 of 2**17 random numbers is possible."""
    who, sizes = Identity.of(numbers), region.geometry
    generation = (who.generation <= OTHER) | ((who.generation >= POISON) & (who.generation <= GUARD))
    return (
        (numbers >= 0) & generation & (who.layer < sizes.layers) & (who.kv < sizes.planes)
        & ((who.slot < sizes.slots) | (who.generation == GUARD)) & (who.head < sizes.heads)
        & ((who.word < sizes.row_words) | (who.generation == GUARD))
    )  # fmt: skip


def _shifted(region: Region, wrong: WrongWords) -> torch.Tensor:
    """Return True for each wrong word if a valid word begins 1 to 7 bytes after the wrong word begins."""
    next_one = (wrong.address + 1).clamp(max=len(region.words) - 1)
    behind = region.words[next_one.to(region.words.device)].cpu()
    found = torch.zeros_like(wrong.found, dtype=torch.bool)
    for by in range(8, 64, 8):
        low = (wrong.found >> by) & ((1 << (64 - by)) - 1)
        found |= _known(region, decode(low | (behind << (64 - by)), region.seed))
    return found
