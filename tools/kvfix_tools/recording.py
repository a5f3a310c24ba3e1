"""Read the files that kvfix/connector_events/recorder.py writes, and bundles of recorder files (`kvfix dump`)."""

import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from kvfix.connector_events.recorder import SCHEMA, Entry
from kvfix.ledger import events

LARGEST = 64 << 20  # bytes. No recorder writes a larger file
#: {name of an event in a recorder file: class of the event}
_EVENTS: dict[str, Any] = {
    name: kind for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, tuple)
}


class Recording(NamedTuple):
    """A recorder file. head: the first line. lines: {kind: lines of this kind}, except the first line and events."""

    path: str
    head: dict[str, Any]
    lines: dict[str, list[dict[str, Any]]]
    entries: list[Entry]

    @property
    def connectors(self) -> dict[int, dict[str, Any]]:
        return {line["number"]: line for line in self.lines.get("connector", [])}

    @property
    def process(self) -> tuple[str, str, int, int]:
        head = self.head
        return str(head.get("node", "")), str(head.get("boot", "")), int(head["pid"]), int(head.get("began", 0))


def read(path: Path) -> Recording:
    """Read a recorder file. Raise OSError if reading fails, and ValueError if the file's content or SCHEMA is wrong."""
    _check_size("the file", path.stat().st_size)
    return parsed(str(path), path.read_bytes().splitlines())


def _check_size(name: str, size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"{name} has {size >> 20} MiB; a recorder writes at most {LARGEST >> 20} MiB")


def read_all(path: Path) -> list[Recording]:
    """Read a recorder file, or all recorder files of a bundle without unpacking it. Raise the same errors as `read`."""
    found = []
    try:
        if not tarfile.is_tarfile(path):
            return [read(path)]
        with tarfile.open(path) as archive:
            for entry in archive:
                name = PurePosixPath(entry.name).name
                if not entry.isfile() or not (name.startswith("recorder-") and name.endswith(".jsonl")):
                    continue
                _check_size(name, entry.size)
                file = archive.extractfile(entry)
                assert file is not None  # `entry` is a regular file
                found.append(parsed(f"{path}:{name}", file.read().splitlines()))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"the bundle is damaged or cut off ({type(error).__name__}: {error})") from None
    if not found:
        raise ValueError("the bundle has no recorder file")
    return found


def parsed(name: str, texts: Iterable[bytes]) -> Recording:
    """Return the recording with these lines. Raise ValueError as `read` does."""
    head: dict[str, Any] | None = None
    lines: dict[str, list[dict[str, Any]]] = {}
    entries: list[Entry] = []
    number = 0
    try:
        for number, text in enumerate(texts, 1):  # noqa: B007
            line = msgspec.json.decode(text, type=dict[str, Any])
            kind = line.pop("kind")
            if head is None:
                if kind != "recorder":
                    raise KeyError("kind", kind)
                if line["schema"] != SCHEMA:
                    reads = f"this kvfix reads {SCHEMA}: use the kvfix that wrote the file"
                    raise ValueError(f"the file has schema {line['schema']!r}, and {reads}")
                head = line
            elif kind == "event":
                place = msgspec.convert([line[field] for field in Entry._fields[:-1]], tuple[int, int, int, str])
                event = _EVENTS[str(line["event"])]
                values = {**event._field_defaults, **line}
                entries.append(Entry(*place, msgspec.convert([values[field] for field in event._fields], event)))
            else:
                lines.setdefault(kind, []).append(line)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"line {number} is not a line of a recorder ({type(error).__name__}: {error})") from None
    if head is None:
        raise ValueError("the file is empty")
    return Recording(name, head, lines, entries)
