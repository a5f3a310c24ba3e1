"""Read from a library's file for which GPU architectures it has code.

nvcc writes code as "fat binaries". A fat binary begins with a header of 16 bytes: magic 0xBA55ED50, version, header
size, size of the rest. Entries follow. The header of an entry has its kind (1 PTX, 2 machine code), version, header
size, size of the code, and at byte 28 the architecture. `cuobjdump --list-elf` prints this, but is rarely installed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)


def architectures(file: Path) -> list[str]:
    """Return the sorted architectures, such as ["80", "90", "compute_90"]; [] if the file has none or is unreadable."""
    found: set[tuple[int, int]] = set()
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(_MAGIC)
            while at >= 0:
                found |= _entries(content, at)
                at = content.find(_MAGIC, at + 4)
    except (OSError, ValueError):
        return []
    return [f"compute_{arch}" if kind == 1 else str(arch) for arch, kind in sorted(found, key=lambda each: each[::-1])]


def _entries(content: mmap.mmap, at: int) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    if at + 16 > len(content):
        return found
    _, version, header, size = struct.unpack_from("<IHHQ", content, at)
    if version != 1 or header != 16 or at + header + size > len(content):
        return found
    entry, end = at + header, at + header + size
    while entry + 64 <= end:
        kind, _, length, code = struct.unpack_from("<HHIQ", content, entry)
        (arch,) = struct.unpack_from("<I", content, entry + 28)
        if kind not in (1, 2) or not 32 <= length <= 4096 or not 30 <= arch <= 999:
            break
        found.add((arch, kind))
        entry += length + code
    return found
