"""Reads the inputs and feeds a case: on all cores where there is enough to read, several files in the order of time."""

from __future__ import annotations

import gc
import marshal
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose import fast, merge, reader, scan

if TYPE_CHECKING:
    from kvfix_tools.diagnose.case import Case

#: Less than this is read in one process.
WORTH_A_POOL = 64 << 20
#: Blocks that another process gets at a time; of several files, fewer of each.
AT_A_TIME = 8

Block = merge.Block


def scan_block(block: bytes) -> Block:
    return len(block), block.count(b"\n"), scan.hits(block, fast.spans())


def scan_piece(piece: bytes, size: int) -> list[bytes]:
    # Packed one by one, while they are in the processor's cache; marshal takes half the time of pickle.
    return [marshal.dumps(scan_block(block)) for block in reader.split(piece, size)]


def scan_chunk(path: str, start: int, end: int, size: int) -> list[bytes]:
    return scan_piece(reader.chunk(path, start, end), size)


def read(
    case: Case, sources: list[reader.Source], jobs: int, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Feed the case with all of them. Answers what could not be read, each with its reason."""
    # Millions of tuples live for a block only, and none of them in a cycle: looking for cycles is a third of the time.
    gc.disable()
    try:
        return _read_all(case, sources, jobs, progress)
    finally:
        gc.enable()


def _read_all(case: Case, sources: list[reader.Source], jobs: int, progress: Callable[[int], None] | None) -> list[str]:
    plain = sum(source.size or 0 for source in sources if not source.packed)
    unreadable: list[str] = []
    if jobs > 1 and plain >= WORTH_A_POOL:
        with ProcessPoolExecutor(jobs) as pool:
            _read(case, sources, pool, jobs, progress, unreadable)
    else:
        _read(case, sources, None, 1, progress, unreadable)
    return unreadable


def _read(
    case: Case,
    sources: list[reader.Source],
    pool: ProcessPoolExecutor | None,
    jobs: int,
    progress: Callable[[int], None] | None,
    unreadable: list[str],
) -> None:
    # Of every file a block is in memory at once: they are merged by time.
    size = max(1 << 16, min(reader.BLOCK, reader.BLOCK * 8 // len(sources)))
    at_a_time = max(1, min(AT_A_TIME, 4 * AT_A_TIME // len(sources)))
    # One piece is waited for while the next is under way.
    ahead = max(2, jobs * 3 // len(sources))

    def counted(blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            case.bytes += block[0]
            if progress is not None:
                progress(block[0])
            yield block

    streams = [
        merge.Stream(source.path, counted(_blocks(source, pool, ahead, size, at_a_time, unreadable)))
        for source in sources
    ]
    for path, base, hits in merge.by_time(streams):
        case.take(path, base, hits)


def _blocks(
    source: reader.Source,
    pool: ProcessPoolExecutor | None,
    ahead: int,
    size: int,
    at_a_time: int,
    unreadable: list[str],
) -> Iterator[Block]:
    try:
        if pool is not None and not source.packed:
            edges = reader.chunks(source, size * at_a_time)
            yield from _ahead(pool, ahead, ((scan_chunk, (source.path, *each, size)) for each in edges))
            return
        with reader.open_source(source) as stream:
            if pool is None:
                for block in reader.blocks(source, stream, size):
                    yield scan_block(block)
            else:
                pieces = reader.blocks(source, stream, size * at_a_time)
                yield from _ahead(pool, ahead, ((scan_piece, (piece, size)) for piece in pieces))
    except (reader.Unreadable, OSError) as error:
        unreadable.append(str(error))


def _ahead(
    pool: ProcessPoolExecutor, many: int, tasks: Iterator[tuple[Callable[..., list[bytes]], tuple[Any, ...]]]
) -> Iterator[Block]:
    """Results in the order of the tasks, with so many under way: what is not asked for yet takes no memory."""
    running: deque[Future[list[bytes]]] = deque()
    for function, arguments in tasks:
        running.append(pool.submit(function, *arguments))
        if len(running) >= many:
            yield from map(marshal.loads, running.popleft().result())
    while running:
        yield from map(marshal.loads, running.popleft().result())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bar(total: int) -> Callable[[int], None] | None:
    """Progress on stderr, for a person and long work only."""
    if total < 32 << 20 or not sys.stderr.isatty():
        return None
    done = 0

    def show(size: int) -> None:
        nonlocal done
        done += size
        end = "\n" if done >= total else ""
        print(f"\rkvfix-diagnose: {done / 1e6:.0f} of {total / 1e6:.0f} MB{end}", end="", file=sys.stderr, flush=True)

    return show
