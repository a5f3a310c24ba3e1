"""Where in a block the lines stand that may mean something. Literals first: most lines are never looked at.

A search for a literal in a whole block costs a fraction of looking at each line. What kvfix knows of single problems
adds no needle: problems are looked for in lines of errors and warnings only.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ahocorasick_rs import BytesAhoCorasick, Implementation

#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
FRAME = b"] LMCache "
#: What a line that is read holds. A test shows that they cover every message of the grammar.
NEEDLES: tuple[bytes, ...] = (
    b" LMCache ", b":lmcache.", b"_mp_connector)", b'{"kind":"',
    b"throughput: ", b"KV load failure", b"FOR_REMOTE_KVS", b"broadcast block", b"Initializing a V", b"assert ",
    b'", line ', b"rror", b"ERROR", b"WARN", b"Traceback (", b"xception", b"fault", b"illed", b"terminate called",
    b"kv_connector", b"connector with name", b"[shutdown]", b"Thread ", b"Process ", b".cpp:",
    b"Assertion `", b"undefined symbol", b"shared object", b"GLIBC", b"CXXABI_", b"FATAL", b"core dumped", b"Aborted",
    b"double free", b"free(): ", b"malloc(): ", b"corrupted ", b"code 137", b"Exit Code: ",
)  # fmt: skip
_ANY = BytesAhoCorasick(NEEDLES, implementation=Implementation.DFA)
#: Places of a line that has no frame: with a needle, and without.
NEEDLE, NOTHING = -2, -1


def places(block: bytes) -> tuple[list[bytes], list[int]]:
    """The lines of a block, and where in each LMCache's frame begins; `NEEDLE` or `NOTHING`: it has none."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    found = [line.find(FRAME) for line in lines]
    others = [number for number, place in enumerate(found) if place < 0]
    for number in _with_needle([lines[number] for number in others]):
        found[others[number]] = NEEDLE
    return lines, found


def in_line(line: bytes) -> bool:
    return any(needle in line for needle in NEEDLES)


def _with_needle(lines: list[bytes]) -> set[int]:
    """Numbers of the lines with a needle. One search for all needles in all of them."""
    ends = list(accumulate(len(line) + 1 for line in lines))
    found = _ANY.find_matches_as_indexes(b"\n".join(lines))
    return {bisect_right(ends, at) for _, at, _ in found}
