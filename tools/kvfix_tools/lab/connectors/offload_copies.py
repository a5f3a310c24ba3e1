"""Replacements for the GPU driver's copies, streams and events between GPU and CPU memory.

A copy ends some steps after it was submitted, or when vLLM waits for its event. Parts of its source that change
meanwhile arrive as garbage: vLLM must wait for the copy before other requests write there.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kvfix_tools.lab.engine.memory import GARBAGE, Slots

#: Bytes of a slot's content.
WORD = 8


class Copy(NamedTuple):
    """A copy. due: the step in which it ends. moves: (to, source, bytes). found: the contents of the sources."""

    due: int
    moves: list[tuple[int, int, int]]
    found: list[bytes]
    done: Callable[[], None]


class Copies:
    """The copies of one rank. gpu: the GPU memory. Its addresses stand for the slots' blocks."""

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
        """Make this handler copy here. OffloadingConnector's worker has one handler for each direction."""
        handler._swap_blocks_batch = self._swap
        handler._event_pool = _Events(self)

    def tick(self) -> None:
        self.now += 1
        self.finish(self.now)

    @contextmanager
    def of_job(self, fails: bool = False, done: Callable[[], None] = lambda: None) -> Iterator[None]:
        """In this context all copies belong to one job. fails: copy nothing. done: called at the end of the copies."""
        self._fails, self._done = fails, done
        self.last = None
        yield
        if self.last is None:
            done()

    def _swap(self, source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        self._submit([] if self._fails else zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True))

    def batch(self, to: int, source: int, sizes: int, count: int, *_: Any) -> int:
        """Replaces the driver's cuMemcpyBatchAsync, with arrays of addresses and sizes. Returns 0, or an error."""
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
        """End all copies that are due by then, in their order."""
        while self.pending and self.pending[0].due <= now:
            copy = self.pending.popleft()
            for (to, source, size), before in zip(copy.moves, copy.found, strict=True):
                found = self._read(source, size)
                self._write(to, found if found == before else array("q", [GARBAGE] * (size // WORD)).tobytes())
            copy.done()

    def is_done(self, copy: Copy | None) -> bool:
        return copy is None or copy not in self.pending

    def _block(self, address: int) -> int | None:
        """Return the block of the slots at this address; None for CPU memory."""
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
    """Replaces the GPU's event: the last copy before it was recorded."""

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
    """Replaces a handler's pool of events, and always has one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def pop(self) -> Event:
        return Event(self._copies)

    def append(self, event: Event) -> None: ...

    def clear(self) -> None: ...
