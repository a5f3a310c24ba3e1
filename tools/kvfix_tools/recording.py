"""A recorder file of `kvfix.connector_events`, read back: who wrote it, its connectors, and its entries in their order.

A bundle of `kvfix dump` has those of all processes of a node. kvfix/connector_events/dump.py writes and describes them.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from kvfix.connector_events.dump import SCHEMA
from kvfix.connector_events.recorder import Entry
from kvfix.ledger.events import EVENTS, Event

#: Files that are larger were not written by a recorder.
LARGEST = 64 << 20
#: {name: the event's type}
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in EVENTS}


class Recording(NamedTuple):
    """`head`: the first line. `lines`: all others that are no event, by kind."""

    path: str
    head: dict[str, Any]
    lines: dict[str, list[dict[str, Any]]]
    entries: list[Entry]

    @property
    def connectors(self) -> dict[int, dict[str, Any]]:
        return {line["number"]: line for line in self.lines.get("connector", [])}

    @property
    def process(self) -> tuple[str, str, int, int]:
        """The same for all recordings of one process, and for no other's."""
        head = self.head
        return str(head.get("node", "")), str(head.get("boot", "")), int(head["pid"]), int(head.get("began", 0))


def read(path: Path) -> Recording:
    """Raises OSError, and ValueError that says which line is wrong, for what no recorder of this kvfix wrote."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it has {path.stat().st_size >> 20} MiB: no recorder writes that much")
    return parsed(str(path), path.read_bytes().splitlines())


def read_all(path: Path) -> list[Recording]:
    """The recordings of a file or of a bundle, of which nothing is unpacked. Raises as `read` does."""
    if not tarfile.is_tarfile(path):
        return [read(path)]
    found = []
    try:
        with tarfile.open(path) as archive:
            for entry in archive:
                name = PurePosixPath(entry.name).name
                if not entry.isfile() or not (name.startswith("recorder-") and name.endswith(".jsonl")):
                    continue
                file = archive.extractfile(entry)
                if entry.size > LARGEST or file is None:
                    raise ValueError(f"{name} has {entry.size >> 20} MiB: no recorder writes that much")
                found.append(parsed(f"{path}:{name}", file.read().splitlines()))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"it is no whole bundle ({type(error).__name__}: {error})") from None
    if not found:
        raise ValueError("the bundle has no recorder of any process")
    return found


def parsed(name: str, texts: Iterable[bytes]) -> Recording:
    """The same of its lines."""
    head: dict[str, Any] | None = None
    lines: dict[str, list[dict[str, Any]]] = {}
    entries: list[Entry] = []
    number = 0
    try:
        for number, text in enumerate(texts, 1):  # noqa: B007
            line = decoded(text)
            kind = line.pop("kind")
            if head is None:
                _check(kind, line)
                head = line
            elif kind == "event":
                place = msgspec.convert([line[field] for field in Entry._fields[:-1]], tuple[int, int, int, str])
                entries.append(Entry(*place, event(line)))
            else:
                lines.setdefault(kind, []).append(line)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"line {number} is no line of a recorder ({type(error).__name__}: {error})") from None
    if head is None:
        raise ValueError("it is empty")
    return Recording(name, head, lines, entries)


def _check(kind: Any, head: dict[str, Any]) -> None:
    if kind != "recorder":
        raise KeyError("kind", kind)
    if head["schema"] != SCHEMA:
        raise ValueError(f"it is of schema {head['schema']!r}, this kvfix reads {SCHEMA}: use the kvfix that wrote it")


def decoded(text: bytes) -> dict[str, Any]:
    """One line of the file. Raises msgspec.DecodeError or UnicodeDecodeError for what is no JSON object."""
    return msgspec.json.decode(text, type=dict[str, Any])


def event(line: dict[str, Any]) -> Event:
    """The event of such a line. Raises KeyError or msgspec.ValidationError where this kvfix has no such event."""
    kind = _EVENTS[str(line["event"])]
    values = {**kind._field_defaults, **line}
    return msgspec.convert([values[field] for field in kind._fields], kind)  # type: ignore[no-any-return]
