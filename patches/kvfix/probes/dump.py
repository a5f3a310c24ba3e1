"""The recorder on disk: JSON lines, written whole or not at all, in a directory that only its owner can read.

The first line tells what the file is; the others follow in any order, each with its `kind`:

    {"kind": "recorder", "schema": 1, "reason": "violation", "pid": 1, "process": "EngineCore", "mode": "check",
     "node": "n1", "boot": "...", "began": 1, ...}
    {"kind": "connector", "number": 1, "name": "LMCacheConnectorV1", "role": "SCHEDULER", "inside": null,
     "engine": "0a1b2", "replica": 0, "rank": 0, "ranks": 2, ...}
    {"kind": "scheduler", "running": 3, "waiting": 2, "blocks": 60, "free_blocks": 5}
    {"kind": "event", "connector": 1, "hook": "...", "mono": 12, "wall": 34, "event": "Asked", "request": "r", ...}
    {"kind": "finding", "code": "KVR002", "name": "promise-changed", "request": "r", "message": "...", ...}
    {"kind": "fix", "code": "KVF001", "dist": "lmcache", "version": "0.3.10", "verdict": "applied", ...}

mono: nanoseconds of the monotonic clock, which is one clock for all processes of the same `boot`; wall: since 1970.
pid and began (clock ticks after boot) are one process of a node. Of a request there are its id and counts, no tokens.
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvfix import clock
from kvfix.probes import alarm, readers, recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvfix.cures import Cure
    from kvfix.ledger import Finding
    from kvfix.probes.watch import Watch

SCHEMA = 1
#: The files go into a folder of this user's own in this one; default: where temporary files go.
DIRECTORY = "KVFIX_DUMP_DIR"
#: Bytes of one file at most; the oldest events are left out. Files of one process that are kept.
LARGEST, FILES = 8 << 20, 32

_written: list[str] = []
_announced: set[str] = set()
_numbers = count(1)


@contextmanager
def _folder() -> Iterator[tuple[str, int]]:
    """Path and descriptor of the folder, 0700, made if need be. Raises OSError if it is not this user's alone.

    The one that it is in may be shared with others (1777): what stands there under our name may be a link, or theirs.
    Nothing is changed in its mode, and files are made by the descriptor, wherever the path leads by then.
    """
    shared = os.environ.get(DIRECTORY) or tempfile.gettempdir()
    os.makedirs(shared, mode=0o700, exist_ok=True)
    path = os.path.join(shared, f"kvfix-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):  # for the message: O_NOFOLLOW would refuse it in other words
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


def announce() -> None:
    """Tell `kvfix dump` that this process answers its signal: to one that does not, the signal would be the end."""
    engines = sorted({watch.place["engine"] for watch in list(recorder.watches.values()) if watch.place})
    ready = {"kind": "ready", "schema": SCHEMA, "pid": os.getpid(), "began": _began(), "engines": engines}
    with _folder() as folder:
        _announced.add(_whole(folder, f"kvfix-{os.getpid()}.ready", _encode(ready)))
    atexit.unregister(withdraw)
    atexit.register(withdraw)


def withdraw() -> None:
    """It does not any more. Idempotent."""
    while _announced:
        _remove(_announced.pop())


def write(
    reason: str,
    watch: Watch | None = None,
    hook: str = "",
    finding: Finding | None = None,
    cures: Sequence[Cure] = (),
) -> str:
    """The recorder, and a report beside it if there is a finding. Path of the report, else of the recorder.

    reason: violation, exception, signal or exit. Raises OSError where the disk does not take it.
    """
    stem = f"kvfix-{os.getpid()}-{time.time_ns() // 1_000_000}-{next(_numbers)}-{reason}"
    with _folder() as folder:
        lines = [_encode(line) for line in _lines(reason, finding)]
        recording = _whole(folder, f"{stem}.jsonl", _bounded(lines))
        _written.append(recording)
        while len(_written) > FILES:
            _remove(_written.pop(0))
        if finding is None or watch is None:
            return recording
        from kvfix.probes import report

        return _whole(folder, f"{stem}.txt", report.text(watch, hook, finding, cures, recording).encode())


def _began() -> int:
    """When this process did: another one may get its number one day."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _clock() -> dict[str, Any]:
    """Whose clock the monotonic one is. Containers of a machine have one clock, and names of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return {"node": os.uname().nodename, "boot": file.read().strip(), "began": _began()}
    except (OSError, ValueError, IndexError):
        return {"node": os.uname().nodename, "boot": "", "began": 0}


def _lines(reason: str, finding: Finding | None) -> Iterator[dict[str, Any]]:
    yield {"kind": "recorder", "schema": SCHEMA, "reason": reason, **process()}
    for watch in list(recorder.watches.values()):
        yield {"kind": "connector", **_connector(watch)}
    yield from _fixes()
    state = scheduler_state()
    if state:
        yield {"kind": "scheduler", **state}
    if finding is not None:
        told = finding._asdict() | {
            "event": _event(finding.event),
            "earlier": finding.earlier and _event(finding.earlier),
        }
        yield {"kind": "finding", **told}
    for entry in recorder.snapshot():
        yield {"kind": "event", **entry._asdict(), **_event(entry.event)}


def process() -> dict[str, Any]:
    """Who writes this, and when."""
    import kvfix
    from kvfix import target

    multiprocessing: Any = sys.modules.get("multiprocessing")
    name = multiprocessing.current_process().name if multiprocessing else ""
    return {
        "pid": os.getpid(),
        "process": name,
        **_clock(),
        "mode": alarm.mode,
        "kvfix": kvfix.__version__,
        "versions": {dist: target.version(dist) for dist in ("vllm", "lmcache")},
        "wall": time.time_ns(),
        "mono": time.monotonic_ns(),
        "violations": dict(alarm.found),
    }


def _connector(watch: Watch) -> dict[str, Any]:
    inside, since = min(watch.running.copy().values(), key=itemgetter(1), default=(None, 0.0))  # the longest
    return {
        "number": watch.number,
        "name": watch.name,
        "role": watch.role,
        **watch.place,
        "inside": inside,
        "seconds": round(clock.now() - since, 6) if inside else None,
        "steps": watch.steps,
        "calls": dict(watch.calls),
        "trusted": watch.trusted,
        "sees_loads": watch.sees_loads,
        "sizes": readers.sizes(watch.connector, watch.reader),
        "kept": kept(watch),
    }


def kept(watch: Watch) -> dict[str, int]:
    """How many requests the connector's own state speaks of, by place. Empty if it cannot be read."""
    try:
        return {where: len(names) for where, names in watch.reader.kept()}
    except Exception:  # noqa: BLE001  what it holds is a supplement
        return {}


def scheduler_state() -> dict[str, int]:
    """Requests running and waiting, blocks in all and free. Empty if there is no scheduler here, or not this kind.

    Of several engines in one process nobody knows whose state is asked for.
    """
    try:
        (found,) = (found for each in list(alarm.schedulers) if (found := each()) is not None)
        pool = found.kv_cache_manager.block_pool
        return {
            "running": len(found.running),
            "waiting": len(found.waiting),
            "blocks": pool.num_gpu_blocks,
            "free_blocks": pool.get_num_free_blocks(),
        }
    except Exception:  # noqa: BLE001  what it holds is a supplement
        return {}


def _fixes() -> Iterator[dict[str, Any]]:
    from kvfix import patching

    for patch, verdict in list(patching.settled().items()):
        yield {"kind": "fix", "function": patch.function, "dist": patch.dist, **verdict._asdict()}


def _event(event: Any) -> dict[str, Any]:
    return {"event": type(event).__name__, **event._asdict()}


def _encode(line: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.json.encode(line, enc_hook=lambda other: f"<{type(other).__name__}>") + b"\n"


def _bounded(lines: list[bytes]) -> bytes:
    """All that is not an event, and of the events the last ones, as many as the largest file holds."""
    events = [index for index, line in enumerate(lines) if line.startswith(b'{"kind":"event"')]
    size = sum(map(len, lines))
    for index in events:
        if size <= LARGEST:
            break
        size -= len(lines[index])
        lines[index] = b""
    return b"".join(lines)


def _whole(folder: tuple[str, int], name: str, content: bytes) -> str:
    """Its path. Written aside, then named: a reader finds all of it or nothing."""
    path, descriptor = folder
    aside = f"{name}.{os.getpid()}.{next(_numbers)}.part"  # two threads may write the same
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=descriptor)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        _remove(os.path.join(path, aside))
        raise
    return os.path.join(path, name)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _in_child() -> None:
    """What the parent has written and announced is the parent's to remove."""
    _written.clear()
    _announced.clear()


os.register_at_fork(after_in_child=_in_child)
