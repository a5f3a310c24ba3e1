"""Keep the last events of this process in a bounded queue (the flight recorder), and write recorder files.

If a hook call causes no event, the recorder only counts the call. So steps without events leave the queue unchanged.

A recorder file has JSON lines. kvfix writes the file atomically, in a folder that only its owner can read. The first
line describes the file. The other lines follow in any order. Each line has a `kind`:

    {"kind": "recorder", "schema": 1, "reason": "violation", "pid": 1, "process": "EngineCore", "mode": "check",
     "node": "n1", "boot": "...", "began": 1, ...}
    {"kind": "connector", "number": 1, "name": "LMCacheConnectorV1", "role": "SCHEDULER", "inside": null,
     "engine": "0a1b2", "replica": 0, "rank": 0, "ranks": 2, "stepped": 12, ...}
    {"kind": "scheduler", "running": 3, "waiting": 2, "blocks": 60, "free_blocks": 5}
    {"kind": "event", "connector": 1, "hook": "...", "mono": 12, "wall": 34, "event": "Asked", "request": "r", ...}
    {"kind": "finding", "code": "KVR002", "name": "promise-changed", "request": "r", "message": "...", ...}
    {"kind": "state", "schema": 1, "scheduler": {...}, ...}    at a signal or a standstill: see kvfix.engine_state
    {"kind": "stacks", "pid": 1, "text": "Thread 0x... (most recent call first): ..."}    at a signal or a standstill
    {"kind": "fix", "function": "LMCacheConnectorV1Impl.get_finished", "dist": "lmcache", "verdict": "applied", ...}
    {"kind": "tally", "code": "KVF001", "acted": 3, "faults": 0, "first": "..."}

- mono: nanoseconds of the monotonic clock, which all processes of the same `boot` share
- wall: nanoseconds since 1970
- stepped: time of the scheduler's last step, on the same clock as mono (0 in a worker)
- began: start of the process, in clock ticks after boot. Together, pid and began identify a process on its node

The file has ids and token counts of requests, but no tokens.
"""

import errno
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from kvfix import clock, engine_state, installed_source, metrics
from kvfix.connector_events import readers
from kvfix.engine_state import places
from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix.session import session
from kvfix.version import VERSION

if TYPE_CHECKING:
    from kvfix.connector_events.watched import WatchedConnector

SCHEMA = 1
#: Maximum size of a recorder file in bytes. If a file would be larger, kvfix leaves out its oldest events.
LARGEST = 8 << 20
#: Maximum number of files of one process, and of all processes of the user. A crash loop starts many processes.
FILES, FILES_OF_ALL = 32, 256
#: Environment variable: the folder in which each user gets a private folder. Default: the folder for temporary files.
DIRECTORY = "KVFIX_DUMP_DIR"

#: Matches the name of a recorder file or of a report. The group is the file's time, in milliseconds since 1970.
_DATED = re.compile(r"kvfix-\d+-(\d+)-\d+-\w+\.(?:jsonl|txt)")
_numbers = count(1)


class Entry(NamedTuple):
    """An event, and the connector and hook that caused the event."""

    mono: int
    wall: int
    connector: int
    hook: str
    event: Event


def add(connector: int, hook: str, event: Event) -> None:
    session.events.append(Entry(time.monotonic_ns(), time.time_ns(), connector, hook, event))


def snapshot() -> list[Entry]:
    """Return the events, oldest first."""
    for _ in range(8):
        with suppress(RuntimeError):  # another thread added an event during the copy
            return list(session.events)
    return []


def register(watched: "WatchedConnector") -> None:
    if session.connectors is None:
        session.connectors = WeakValueDictionary()
    session.connectors[watched.number] = watched


def connectors() -> "list[WatchedConnector]":
    """Return every watched connector and scheduler of this process that still exists."""
    found = session.connectors.valuerefs() if session.connectors is not None else []
    return [each for reference in found if (each := reference()) is not None]


def schedulers() -> list[Any]:
    """Return every watched scheduler of this process that still exists, the newest first."""
    return [each.connector for each in reversed(connectors()) if hasattr(each.connector, "schedule")]


def write(reason: str, finding: Finding | None = None, more: Iterable[dict[str, Any]] = ()) -> str:
    """Write a recorder file and return its path. `reason` becomes part of the file's name. Raises OSError."""
    name = f"kvfix-{os.getpid()}-{time.time_ns() // 1_000_000}-{next(_numbers)}-{reason}.jsonl"
    with folder() as private:
        recording = write_file(private, name, _bounded([encode(line) for line in (*_lines(reason, finding), *more)]))
        dated = sorted((int(found[1]), name) for name in os.listdir(private[1]) if (found := _DATED.match(name)))
        for _, oldest in dated[:-FILES_OF_ALL]:
            with suppress(OSError):  # another process has removed the file
                os.unlink(oldest, dir_fd=private[1])
    session.files.append(recording)
    while len(session.files) > FILES:
        remove(session.files.pop(0))
    return recording


def began(pid: int | str = "self") -> int:
    """Return the start of a process, in clock ticks after boot. A pid alone is not unique over time."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _clock() -> dict[str, Any]:
    """Return fields that identify the monotonic clock and the process. Containers on one host share `boot`."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return {"node": os.uname().nodename, "boot": file.read().strip(), "began": began()}
    except (OSError, ValueError, IndexError):
        return {"node": os.uname().nodename, "boot": "", "began": 0}


def _lines(reason: str, finding: Finding | None) -> Iterator[dict[str, Any]]:
    yield {
        "kind": "recorder",
        "schema": SCHEMA,
        "reason": reason,
        "pid": os.getpid(),
        "process": places.process_name(),
        **_clock(),
        "mode": session.mode,
        "kvfix": VERSION,
        "versions": {dist: installed_source.version(dist) for dist in ("vllm", "lmcache")},
        "wall": time.time_ns(),
        "mono": time.monotonic_ns(),
        "violations": dict(session.violations),
    }
    for watched in connectors():
        yield {"kind": "connector", **_connector(watched)}
    yield from _fixes()
    state = scheduler_state()
    if state:
        yield {"kind": "scheduler", **state}
    if reason == "signal":
        yield {"kind": "state", **engine_state.collect()}
    if reason in ("signal", "standstill"):
        yield {"kind": "stacks", "pid": os.getpid(), "text": places.dump()}
    if finding is not None:
        events = {"event": _event(finding.event), "earlier": finding.earlier and _event(finding.earlier)}
        yield {"kind": "finding", **finding._asdict(), **events}
    for entry in snapshot():
        yield {"kind": "event", **entry._asdict(), **_event(entry.event)}


def _connector(watched: "WatchedConnector") -> dict[str, Any]:
    # If several threads are in a hook, take the thread that has been in its hook for the longest time.
    inside, since = min(watched.running.copy().values(), key=itemgetter(1), default=(None, 0.0))
    return {
        "number": watched.number,
        "name": watched.name,
        "role": watched.role,
        **watched.place,
        "inside": inside,
        "seconds": round(clock.now() - since, 6) if inside else None,
        "steps": watched.steps,
        "stepped": int(watched.stepped * 1e9),
        "calls": dict(watched.calls),
        "trusted": watched.trusted,
        "sees_loads": watched.sees_loads,
        "sizes": readers.sizes(watched.connector, watched.reader),
        "kept": kept(watched),
    }


def kept(watched: "WatchedConnector") -> dict[str, int]:
    """Return the number of requests in each attribute of the connector, or {} if the attributes cannot be read."""
    try:
        return {where: len(names) for where, names in watched.reader.kept()}
    except Exception:  # noqa: BLE001  optional fields
        return {}


def scheduler_state() -> dict[str, int]:
    """Return the scheduler's request and block counts. Return {} unless this process has exactly one scheduler."""
    try:
        (found,) = schedulers()
        pool = found.kv_cache_manager.block_pool
        return {
            "running": len(found.running),
            "waiting": len(found.waiting),
            "blocks": pool.num_gpu_blocks,
            "free_blocks": pool.get_num_free_blocks(),
        }
    except Exception:  # noqa: BLE001  optional fields
        return {}


def _fixes() -> Iterator[dict[str, Any]]:
    for target, found in list(session.outcomes.items()):
        outcome = {"verdict": found.state, "reason": found.reason}
        yield {"kind": "fix", "function": target.function, "dist": target.dist, **outcome}
    for tally in list(session.tallies.values()):
        if tally.acted or tally.faults:
            yield {"kind": "tally", "code": tally.key, **metrics.counts(tally.key)}


def _event(event: Any) -> dict[str, Any]:
    return {"event": type(event).__name__, **event._asdict()}


def encode(line: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.json.encode(line, enc_hook=lambda other: f"<{type(other).__name__}>") + b"\n"


def _bounded(lines: list[bytes]) -> bytes:
    """Join the lines. Leave out the oldest events if the file would be larger than LARGEST bytes."""
    events = [index for index, line in enumerate(lines) if line.startswith(b'{"kind":"event"')]
    size = sum(map(len, lines))
    for index in events:
        if size <= LARGEST:
            break
        size -= len(lines[index])
        lines[index] = b""
    return b"".join(lines)


@contextmanager
def folder() -> Iterator[tuple[str, int]]:
    """Yield path and descriptor of the private folder (mode 0700). Raises OSError if other users can access the folder.

    If all users can write to the parent folder (mode 1777), another user can make a link or folder with this name.
    kvfix creates files through the descriptor, so that a user who replaces the folder later cannot redirect a file.
    """
    shared = os.environ.get(DIRECTORY) or tempfile.gettempdir()
    os.makedirs(shared, mode=0o700, exist_ok=True)
    path = os.path.join(shared, f"kvfix-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):  # O_NOFOLLOW also refuses a link, but with an unclear message
        raise PermissionError(errno.EPERM, f"{path} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{path} belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, f"{path} is open to other users (chmod 700, or remove it)")
        yield path, descriptor
    finally:
        os.close(descriptor)


def write_file(folder: tuple[str, int], name: str, content: bytes) -> str:
    """Write the file under a temporary name and rename it. Readers never see an incomplete file. Return the path."""
    path, descriptor = folder
    part = f"{name}.{os.getpid()}.{next(_numbers)}.part"  # two threads may write the same file
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=descriptor)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        remove(os.path.join(path, part))
        raise
    return os.path.join(path, name)


def remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
