"""The ranks of one of two engines (nixl.py): the KV heads that each has in its memory, and what all of them report."""

from __future__ import annotations

from typing import Any

import numpy

from kvfix_tools.lab.memory import GARBAGE
from kvfix_tools.lab.mp_client import SharedBlock
from kvfix_tools.lab.options import Options


class HeadsBlock(SharedBlock):
    """A block of several KV heads, or of others than the first: each slot holds its contents once for each head, under
    the head's mark. A slot in which one head has other contents than another holds garbage.

    slots: [heads, slots]. heads: their numbers in the model.
    """

    def __init__(self, slots: Any, heads: range) -> None:
        super().__init__(slots)
        self._marks = (numpy.array(heads, dtype=numpy.int64) << 32)[:, None]

    def __len__(self) -> int:
        return int(self._slots.shape[1])

    def __getitem__(self, place: Any) -> Any:
        found = self._marked(self._slots[:, place])
        return numpy.where((found == found[0]).all(0), found[0], GARBAGE).tolist()

    def __setitem__(self, place: Any, contents: Any) -> None:
        self._slots[:, place] = self._marked(numpy.array([contents], dtype=numpy.int64))

    def __iter__(self) -> Any:
        return iter(self[:])

    def _marked(self, contents: Any) -> Any:
        return numpy.where(contents == GARBAGE, contents, contents ^ self._marks)


def blocks_of(slots: Any, rank: int, options: Options) -> list[SharedBlock]:
    """The blocks of this rank. slots: [blocks, heads, slots]."""
    first = rank * options.kv_heads // options.ranks
    heads = range(first, first + options.heads_of_rank)
    if heads == range(1):
        return [SharedBlock(block[0]) for block in slots]
    return [HeadsBlock(block, heads) for block in slots]


class Together:
    """What each of so many ranks reports, until the last one has: vLLM's KVOutputAggregator counts so too."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reports: dict[tuple[str, str], list[Any]] = {}
        #: request -> ranks that write of it to the peer
        self.writing: dict[str, set[int]] = {}

    def reported(self, what: str, request: str, how: Any) -> list[Any]:
        """What all ranks have reported; nothing, if one has not yet."""
        reports = self._reports.setdefault((what, request), [])
        reports.append(how)
        return self._reports.pop((what, request)) if len(reports) == self._ranks else []
