"""Read the inputs in blocks of whole lines, unpack compressed files, and merge the lines of several files by time.

The memory use does not grow with the input, because a block has 256 kB, and kvfix splits longer lines.
"""

import gzip
import heapq
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.line_scanner import Scanner
from kvfix_tools.diagnose.log_line import LogLine

BLOCK = 256 << 10
#: kvfix skips files with these suffixes in a folder, but reads any file that the user names.
_NOT_LOGS = (".json", ".html", ".py", ".so", ".bin", ".safetensors", ".png", ".zip", ".tar")


class Refused(Exception):
    """kvfix cannot read an input or use an option. The text has the input or option, the reason, and what to do."""


class Source(NamedTuple):
    """An input. `path` is a file, or "-" for standard input. `size` is in bytes on disk, or None if unknown."""

    path: str
    size: int | None

    @property
    def packed(self) -> bool:
        return self.path.endswith((".gz", ".zst"))


def sources(paths: list[str]) -> list[Source]:
    """Return the named files, and logs in named folders. Raise Refused for a missing file or a folder without logs."""
    found: list[Source] = []
    for path in paths:
        if path == "-":
            found.append(Source("-", None))
        elif os.path.isdir(path):
            files = (file for file in sorted(Path(path).rglob("[!.]*")) if not file.name.endswith(_NOT_LOGS))
            inside = [str(file) for file in files if file.is_file()]
            if not inside:
                raise Refused(f"{path}: the folder has no log files. Give the name of a log file")
            found += [Source(file, os.path.getsize(file)) for file in inside]
        else:
            try:
                found.append(Source(path, os.path.getsize(path)))
            except OSError as error:
                raise Refused(f"{path}: {error.strerror or error}. Give a log file, a folder, or - for stdin") from None
    return found


def read(log: Diagnosis, sources: list[Source], advance: Callable[[int], None] | None = None) -> list[str]:
    """Pass the lines of all sources to the diagnosis, in the order of time. Return errors about unreadable sources."""
    unreadable: list[str] = []
    # kvfix holds one block of each file in memory at the same time. So blocks are smaller if there are many files.
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
        except Exception as error:
            reason = _reason(error)
            if not reason:
                raise
            unreadable.append(f"{source.path}: {reason}")
        log.is_own, log.debug = log.is_own or scanner.is_own, log.debug or scanner.debug
        yield from scanner.end()

    every = [lines(source) for source in sources]
    # The lines of a single file keep their order.
    merged = every[0] if len(every) == 1 else map(itemgetter(1), heapq.merge(*map(_timed, every), key=itemgetter(0)))
    for line in merged:
        log.take(line)
    log.is_complete = not unreadable
    return unreadable


def _timed(lines: Iterator[LogLine]) -> Iterator[tuple[float, LogLine]]:
    """Yield (time, line), where times never decrease. A line without a time gets the time of the previous line."""
    now = 0.0
    for line in lines:
        now = max(now, line.time or 0.0)
        yield now, line


def _opened(source: Source) -> BinaryIO:
    if source.path == "-":
        return sys.stdin.buffer
    if source.path.endswith(".zst"):
        return _zstd(source.path)
    return cast("BinaryIO", gzip.open(source.path)) if source.path.endswith(".gz") else open(source.path, "rb")


def _zstd(path: str) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise OSError(
            f"zstandard is not installed. Run pip install zstandard, or: zstd -dc {path} | kvfix-diagnose -"
        ) from None
    return cast("BinaryIO", zstandard.open(path, "rb"))


def blocks(source: Source, stream: BinaryIO, size: int = BLOCK) -> Iterator[bytes]:
    """Yield whole lines in blocks of about `size` bytes. Yield lines of standard input as soon as they arrive."""
    read = getattr(stream, "read1", stream.read) if source.path == "-" else stream.read
    rest = b""
    while piece := read(size):
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


def _reason(error: Exception) -> str:
    """Return the reason why an input cannot be read, or "" if the input did not cause the error."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) or type(error).__name__ == "ZstdError":
        return f"damaged ({error}); kvfix-diagnose has read the part before the damage"
    return error.strerror or str(error) if isinstance(error, OSError) else ""
