"""Where in a block the lines stand that may mean something. Literals first: most lines are never looked at.

A search for a literal in a whole block costs a fraction of looking at each line. What kvfix knows of single problems
adds no needle: problems are looked for in lines of errors and warnings only.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
FRAME = b"] LMCache "
#: What a line that is read holds. A test shows that they cover every message of the grammar.
NEEDLES: tuple[bytes, ...] = (
    b" LMCache ", b":lmcache.", b"_mp_connector)", b'{"kind":"',
    b"throughput: ", b"KV load failure", b"FOR_REMOTE_KVS", b"broadcast block", b"Initializing a V", b"assert ",
    b'", line ', b"rror", b"ERROR", b"WARN", b"Traceback (", b"xception", b"fault", b"illed", b"terminate called",
    b"kv_connector", b"connector with name", b"[shutdown]", b"Thread ", b"Process ", b".cpp:",
    b"Assertion `",
)  # fmt: skip
#: What is looked for in a block: a part that several needles share.
_SHARED = {b"_mp_connector)": b"onnector", b"kv_connector": b"onnector", b"connector with name": b"onnector",
           b"assert ": b"ssert", b"Assertion `": b"ssert"}  # fmt: skip
_PARTS = tuple(dict.fromkeys(_SHARED.get(needle, needle) for needle in NEEDLES))
#: Places of a line that has no frame: with a part of a needle, and without.
PART, NOTHING = -2, -1


def places(block: bytes) -> tuple[list[bytes], list[int]]:
    """The lines of a block, and where in each LMCache's frame begins; `PART` or `NOTHING`: it has none."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    found = [line.find(FRAME) for line in lines]
    others = [number for number, place in enumerate(found) if place < 0]
    for number in _with_part([lines[number] for number in others]):
        found[others[number]] = PART
    return lines, found


def in_line(line: bytes) -> bool:
    return any(needle in line for needle in NEEDLES)


def _with_part(lines: list[bytes]) -> set[int]:
    """Numbers of the lines with a part of a needle. One search for each in all of them."""
    text = b"\n".join(lines)
    ends = list(accumulate(len(line) + 1 for line in lines))
    numbers: set[int] = set()
    for part in _PARTS:
        at = text.find(part)
        while at >= 0:
            number = bisect_right(ends, at)
            numbers.add(number)
            at = text.find(part, ends[number])
    return numbers
