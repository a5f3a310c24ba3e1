"""What is to be read, in blocks of whole lines, whoever wrote it and however it is packed.

Memory does not grow with the input: a block is a few megabytes, and a line that is longer is handed on in pieces.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

#: Its hits stay in the processor's cache: with blocks of 2 MB a third of the speed is lost.
BLOCK = 256 << 10
#: Files in a folder that are not text are left out by name; what is given by name is always read.
_NOT_LOGS = (".json", ".html", ".py", ".so", ".bin", ".safetensors", ".png", ".zip", ".tar")


class Unreadable(Exception):
    """Names the input, what is wrong, and what can be done."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Source(NamedTuple):
    """One input. `path` is "-" for standard input. `size` in bytes on disk; None: not known."""

    path: str
    size: int | None

    @property
    def packed(self) -> bool:
        return self.path == "-" or self.path.endswith((".gz", ".zst"))


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


def open_source(source: Source) -> BinaryIO:
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


def split(piece: bytes, size: int = BLOCK) -> Iterator[bytes]:
    """Of what is in memory already: blocks of whole lines, about `size` bytes each."""
    start = 0
    while start < len(piece):
        end = piece.rfind(b"\n", start, start + size) + 1 or start + size
        yield piece[start:end]
        start = end


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


def chunks(source: Source, size: int = BLOCK) -> list[tuple[int, int]]:
    """(start, end) in bytes of pieces of a plain file, which begin and end with lines; for many cores."""
    assert source.size is not None
    edges = [0]
    with open(source.path, "rb") as file:
        while edges[-1] + size < source.size:
            at = edges[-1] + size
            file.seek(at)
            more = file.read(1 << 16).find(b"\n")
            edges.append(at + more + 1 if more >= 0 else at)
    return list(zip(edges, [*edges[1:], source.size], strict=True))


def chunk(path: str, start: int, end: int) -> bytes:
    """These bytes of the file."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start, io.SEEK_SET)
        return file.read(end - start)
