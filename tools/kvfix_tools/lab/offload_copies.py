"""In place of a GPU where vLLM copies between it and CPU memory: the driver's copies, streams and events, in steps.

A copy is done some steps after it was submitted, or when an event of it is waited for. What changes meanwhile at its
source arrives as garbage: the copy runs beside the steps, and vLLM waits for it before others write there.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kvfix_tools.lab.memory import GARBAGE, Slots

#: Bytes of a slot's content.
WORD = 8


class Copy(NamedTuple):
    """`due`: the step in which it is done. moves: (to, source, bytes), addresses. found: what was at the sources."""

    due: int
    moves: list[tuple[int, int, int]]
    found: list[bytes]
    done: Callable[[], None]


class Copies:
    """Those of one rank. `gpu` stands for the GPU memory: its addresses are those of the slots' blocks."""

    def __init__(self, slots: Slots, delay: int, page: int) -> None:
        self._blocks = len(slots)
        self._slots = slots.of_group(slots.room)
        self._delay = delay
        self._page = page
        self.gpu = torch.empty((self._blocks, page), dtype=torch.int8)
        self._start: int = self.gpu.data_ptr()
        self.now = 0
        self.pending: deque[Copy] = deque()
        self.last: Copy | None = None
        self._fails, self._done = False, _nothing

    def take(self, handler: Any) -> None:
        """This handler of the OffloadingConnector's worker, for one direction, copies here."""
        handler._swap_blocks_batch = self._swap
        handler._event_pool = _Events(self)

    def tick(self) -> None:
        """A step of the engine begins."""
        self.now += 1
        self.finish(self.now)

    @contextmanager
    def of_job(self, fails: bool = False, done: Callable[[], None] = lambda: None) -> Iterator[None]:
        """What is submitted meanwhile is for one job. fails: nothing of it is copied. done: is called when it is."""
        self._fails, self._done = fails, done
        self.last = None
        yield
        if self.last is None:
            done()

    def _swap(self, source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        self._submit([] if self._fails else zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True))

    def batch(self, to: int, source: int, sizes: int, count: int, *_: Any) -> int:
        """In place of the driver's cuMemcpyBatchAsync: arrays of addresses, and of sizes. Not 0: it has failed."""
        if self._fails:
            return 1
        arrays = [(ctypes.c_uint64 * count).from_address(array) for array in (to, source, sizes)]
        self._submit(zip(*arrays, strict=True))
        return 0

    def _submit(self, moves: Iterable[tuple[int, int, int]]) -> None:
        wanted = list(moves)
        found = [self._read(source, size) for _, source, size in wanted]
        self.last = Copy(self.now + self._delay, wanted, found, self._done)
        self.pending.append(self.last)

    def finish(self, now: int) -> None:
        """All copies that are due by then are done, in their order."""
        while self.pending and self.pending[0].due <= now:
            copy = self.pending.popleft()
            for (to, source, size), before in zip(copy.moves, copy.found, strict=True):
                found = self._read(source, size)
                self._write(to, found if found == before else array("q", [GARBAGE] * (size // WORD)).tobytes())
            copy.done()

    def is_done(self, copy: Copy | None) -> bool:
        return copy is None or copy not in self.pending

    def _block(self, address: int) -> int | None:
        """The block of the slots that begins at this address; None: it is CPU memory."""
        block, rest = divmod(address - self._start, self._page)
        if not 0 <= block < self._blocks:
            return None
        assert not rest, "a copy begins within a block"
        return block

    def _read(self, address: int, size: int) -> bytes:
        block = self._block(address)
        if block is None:
            return ctypes.string_at(address, size)
        contents = array("q", self._slots.read([block], 0, self._slots.block_size)).tobytes()
        return contents[:size].ljust(size, b"\0")

    def _write(self, address: int, contents: bytes) -> None:
        block = self._block(address)
        if block is None:
            ctypes.memmove(address, contents, len(contents))
            return
        room = self._slots.block_size * WORD
        self._slots.write([block], 0, array("q", contents[:room]).tolist())


def _nothing() -> None: ...


class Event:
    """In place of the device's event: what was copied last when it was recorded."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._copy: Copy | None = None

    def record(self, stream: Any = None) -> None:
        self._copy = self._copies.last

    def query(self) -> bool:
        return self._copies.is_done(self._copy)

    def synchronize(self) -> None:
        if not self.query() and self._copy is not None:
            self._copies.finish(self._copy.due)

    def elapsed_time(self, later: Any) -> float:
        return 1.0


class _Events:
    """In place of a handler's pool of events, which has always one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def pop(self) -> Event:
        return Event(self._copies)

    def append(self, event: Event) -> None: ...

    def clear(self) -> None: ...
