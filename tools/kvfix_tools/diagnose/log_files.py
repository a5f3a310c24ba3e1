"""What is to be read, in blocks of whole lines, whoever wrote it and however it is packed; and its lines, in order.

Memory does not grow with the input: a block is 256 kB, and a line that is longer is handed on in pieces.
"""

from __future__ import annotations

import gzip
import heapq
import os
import sys
import zlib
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from kvfix_tools.diagnose.line_scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

BLOCK = 256 << 10
#: Files in a folder that are not text are left out by name; what is given by name is always read.
_NOT_LOGS = (".json", ".html", ".py", ".so", ".bin", ".safetensors", ".png", ".zip", ".tar")


class Unreadable(Exception):
    """Names the input, what is wrong, and what can be done."""


class Source(NamedTuple):
    """One input. `path` is "-" for standard input. `size` in bytes on disk; None: not known."""

    path: str
    size: int | None

    @property
    def packed(self) -> bool:
        return self.path.endswith((".gz", ".zst"))


def sources(paths: list[str]) -> list[Source]:
    """The inputs behind these paths: files as they are, folders with all their logs. Raises Unreadable."""
    found: list[Source] = []
    for path in paths:
        if path == "-":
            found.append(Source("-", None))
        elif os.path.isdir(path):
            inside = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file() and _is_log(file.name)]
            if not inside:
                raise Unreadable(f"{path}: the folder has no log files; name one")
            found += [Source(file, os.path.getsize(file)) for file in inside]
        else:
            try:
                found.append(Source(path, os.path.getsize(path)))
            except OSError as error:
                raise Unreadable(
                    f"{path}: {error.strerror or error}; give a log file, a folder, or - for stdin"
                ) from None
    return found


def _is_log(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(_NOT_LOGS)


def read(log: Diagnosis, sources: list[Source], advance: Callable[[int], None] | None = None) -> list[str]:
    """Feed it with the lines of all of them, several files in the order of time.

    advance: called with the bytes of each block. Answers what could not be read, each with its reason.
    """
    unreadable: list[str] = []
    # Of every file a block is in memory at once.
    size = max(1 << 16, BLOCK * 8 // max(8, len(sources)))

    def lines(source: Source) -> Iterator[LogLine]:
        scanner = Scanner(source.path)
        try:
            with _opened(source) as stream:
                for block in blocks(source, stream, size):
                    log.bytes += len(block)
                    if advance is not None:
                        advance(len(block))
                    yield from scanner.scan(block)
        except (Unreadable, OSError) as error:
            unreadable.append(str(error))
        log.is_own = log.is_own or scanner.is_own
        yield from scanner.end()

    for line in _by_time([lines(source) for source in sources]):
        log.take(line)
    log.is_complete = not unreadable
    return unreadable


def _by_time(files: list[Iterator[LogLine]]) -> Iterator[LogLine]:
    """One file is taken as it is."""
    if len(files) == 1:
        return files[0]
    return map(itemgetter(1), heapq.merge(*map(_timed, files), key=itemgetter(0)))


def _timed(lines: Iterator[LogLine]) -> Iterator[tuple[float, LogLine]]:
    """With times that never go back: a line without one has that of the line before."""
    now = 0.0
    for line in lines:
        now = max(now, line.time or 0.0)
        yield now, line


def _opened(source: Source) -> BinaryIO:
    """A stream of the unpacked bytes. Raises Unreadable."""
    try:
        if source.path == "-":
            return sys.stdin.buffer
        if source.path.endswith(".gz"):
            return cast("BinaryIO", gzip.open(source.path))
        if source.path.endswith(".zst"):
            return _zstd(source.path)
        return open(source.path, "rb")
    except OSError as error:
        raise Unreadable(f"{source.path}: {error.strerror or error}") from None


def _zstd(path: str) -> BinaryIO:
    with suppress(ImportError):
        from compression import zstd  # Python 3.14

        return cast("BinaryIO", zstd.open(path))
    try:
        import zstandard
    except ImportError:
        raise Unreadable(
            f"{path}: zstd needs `pip install zstandard`, or: zstd -dc {path} | kvfix-diagnose -"
        ) from None
    return cast("BinaryIO", zstandard.open(path, "rb"))


def blocks(source: Source, stream: BinaryIO, size: int = BLOCK) -> Iterator[bytes]:
    """Whole lines, about `size` bytes at a time; from standard input what is there. A damaged end is read up to it."""
    rest = b""
    for piece in _pieces(source, stream, size):
        cut = piece.rfind(b"\n") + 1
        if cut:
            yield rest + piece[:cut]
            rest = piece[cut:]
        else:
            rest += piece
            if len(rest) >= size:
                yield rest
                rest = b""
    if rest:
        yield rest


def _pieces(source: Source, stream: BinaryIO, size: int) -> Iterator[bytes]:
    read = getattr(stream, "read1", stream.read) if source.path == "-" else stream.read
    while True:
        try:
            piece = read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Unreadable(f"{source.path}: damaged ({error}); what came before it was read") from None
        except OSError as error:
            raise Unreadable(f"{source.path}: {error.strerror or error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise Unreadable(f"{source.path}: damaged ({error}); what came before it was read") from None
        if not piece:
            return
        yield piece
