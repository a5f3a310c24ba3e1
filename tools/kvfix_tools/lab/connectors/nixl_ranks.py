"""The ranks of one engine (nixl.py): the KV heads in their memory, and their reports."""

from __future__ import annotations

from typing import Any

import numpy

from kvfix_tools.lab.connectors.mp_client import SharedBlock
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.options import Options


class HeadsBlock(SharedBlock):
    """A block with several KV heads, or with one head that is not the first.

    Each slot has its content once for each head, combined with the head's number. A slot whose heads have different
    contents reads as garbage.

    slots: [heads, slots]. heads: the numbers of the heads in the model.
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

    def _marked(self, contents: Any) -> Any:
        return numpy.where(contents == GARBAGE, contents, contents ^ self._marks)


def blocks_of(slots: Any, rank: int, options: Options) -> list[SharedBlock]:
    """Return the blocks of this rank. slots: [blocks, heads, slots]."""
    first = rank * options.kv_heads // options.ranks
    heads = range(first, first + options.heads_of_rank)
    if heads == range(1):
        return [SharedBlock(block[0]) for block in slots]
    return [HeadsBlock(block, heads) for block in slots]


class Together:
    """Collects the reports of the ranks until all have reported, as vLLM's KVOutputAggregator does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reports: dict[tuple[str, str], list[Any]] = {}
        #: {request: ranks that write to the peer}
        self.writing: dict[str, set[int]] = {}

    def reported(self, what: str, request: str, how: Any) -> list[Any]:
        """Add a report. Return the reports of all ranks, or [] if a rank has not reported yet."""
        reports = self._reports.setdefault((what, request), [])
        reports.append(how)
        return self._reports.pop((what, request)) if len(reports) == self._ranks else []
