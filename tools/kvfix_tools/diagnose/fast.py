"""Where the optional extra `kvfix[fast]` is installed, hyperscan finds the needles in one pass. The same lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from kvfix_tools.diagnose import grammar, scan


def spans() -> Callable[[bytes], Iterator[tuple[int, int]]]:
    """(start, end) of the lines to look at, by hyperscan if it can be had, else by the standard library.

    KVFIX_DIAGNOSE_FAST=0 leaves it out.
    """
    if os.environ.get("KVFIX_DIAGNOSE_FAST") == "0":
        return scan.spans
    return _hyperscan() or scan.spans


@lru_cache(maxsize=1)
def _hyperscan() -> Callable[[bytes], Iterator[tuple[int, int]]] | None:
    try:
        import hyperscan
    except ImportError:
        return None
    database: Any = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    needles = [b"".join(b"\\x%02x" % sign for sign in needle) for needle in grammar.NEEDLES]
    database.compile(expressions=needles, ids=list(range(len(needles))), elements=len(needles), flags=0)

    def find(block: bytes) -> Iterator[tuple[int, int]]:
        ends: list[int] = []
        database.scan(
            block, match_event_handler=lambda number, start, end, flags, context: context.append(end), context=ends
        )
        last = 0
        for at in ends:  # in the order in which they end
            if at <= last:
                continue
            start = block.rfind(b"\n", 0, at) + 1
            end = block.find(b"\n", at)
            last = end if end >= 0 else len(block)
            yield start, last

    return find
