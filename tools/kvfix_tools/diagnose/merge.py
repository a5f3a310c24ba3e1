"""Several files in the order of time: of each as many hits at a time as come before the next one of another file."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from kvfix_tools.diagnose import scan

#: Of one block: its bytes, its lines, its hits.
Block = tuple[int, int, list[scan.Hit]]


class Stream:
    """A file's hits, block by block, with times that never go back: a line without one has that of the line before."""

    def __init__(self, path: str, blocks: Iterator[Block]) -> None:
        self.path = path
        #: Number of the block's first line.
        self.base = 1
        self.hits: list[scan.Hit] = []
        self.times: list[float] = []
        #: The next hit.
        self.at = 0
        self._blocks = blocks
        self._lines = 0
        self._now = 0.0

    def more(self) -> bool:
        """Whether there is another hit. Reads on where a block is at its end."""
        while self.at >= len(self.hits):
            block = next(self._blocks, None)
            if block is None:
                return False
            self.base += self._lines
            _, self._lines, self.hits = block
            self.at = 0
        return True

    def look(self) -> None:
        """The times of a block's hits."""
        now, last = self._now, b""
        times: list[float] = []
        for hit in self.hits:
            stamp = hit[1]
            if stamp and stamp != last:
                last = stamp
                when = scan.seconds(stamp)
                # vLLM's lines have no year; they count for the order only in a file that has no others.
                if when is not None and when > now and (when > 1e9 or now < 1e9):
                    now = when
            times.append(now)
        self._now, self.times = now, times


def by_time(streams: list[Stream]) -> Iterator[tuple[str, int, list[scan.Hit]]]:
    """(file, number of the block's first line, hits) of all of them. One file is taken as it is."""
    if len(streams) == 1:
        while streams[0].more():
            streams[0].at = len(streams[0].hits)
            yield streams[0].path, streams[0].base, streams[0].hits
        return
    heap = [(index_time, index) for index, each in enumerate(streams) if (index_time := _next(each)) is not None]
    heapq.heapify(heap)
    while heap:
        _, index = heap[0]
        stream = streams[index]
        hits, at = stream.hits, stream.at
        end = len(hits)
        if len(heap) > 1:
            time, other = heap[1] if len(heap) == 2 or heap[1] < heap[2] else heap[2]
            cut = bisect_right if index < other else bisect_left
            end = cut(stream.times, time, at)
        stream.at = end
        yield stream.path, stream.base, hits[at:end]
        following = stream.times[end] if end < len(hits) else _next(stream)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following, index))


def _next(stream: Stream) -> float | None:
    """Time of the stream's next hit; None: it has no more."""
    if stream.at >= len(stream.hits):
        if not stream.more():
            return None
        stream.look()
    return stream.times[stream.at]
