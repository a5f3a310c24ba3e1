"""The processes of an engine; settings of vLLM, LMCache and kvfix, without secrets."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvfix import redact
from kvfix.connector_events.files import DIRECTORY

_SHOWN = ("KVFIX", "VLLM_", "LMCACHE_", "PYTHONHASHSEED")


class Process(NamedTuple):
    """began: clock ticks after boot. settings: of the environment that it was started with. owner: user id.

    directory: where it writes what it has recorded, if it does.
    """

    pid: int
    parent: int
    name: str
    state: str
    began: int
    threads: int
    command: list[str]
    settings: dict[str, str]
    owner: int
    directory: str


def tree(pid: int) -> list[Process]:
    """This process and all below it, parents first. Empty if there is none of this number.

    vLLM gives its processes names (setproctitle), which overwrites some of what /proc shows of their environment: what
    is missing there is what the parent was started with. Ray's workers get theirs later: it is not there either, and
    the one of `kvfix dump` itself is taken.
    """
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except (psutil.NoSuchProcess, ValueError):
        return []
    found: dict[int, Process] = {}
    for process in filter(None, map(_described, pids)):
        parent = found.get(process.parent)
        if parent is not None and DIRECTORY not in process.settings:
            settings = {**parent.settings, **process.settings}
            shared = os.path.dirname(parent.directory)
            process = process._replace(settings=settings, directory=_own_folder(shared, process.owner))
        found[process.pid] = process
    return list(found.values())


def elsewhere(tree: list[Process]) -> list[Process]:
    """Those of the same engine on this node that are not below it: Ray's workers are below its raylet."""
    engines = {engine for process in tree for engine in ready(process).get("engines", ())}
    found: list[Process] = []
    for directory in dict.fromkeys(process.directory for process in tree):
        for path in sorted(Path(directory).glob("kvfix-*.ready")):
            pid = path.stem.rpartition("-")[2]
            process = _described(int(pid)) if pid.isdecimal() else None
            if process is None or process.pid in {each.pid for each in [*tree, *found]}:
                continue
            process = process._replace(directory=directory)
            announced = ready(process)
            if announced.get("began") == process.began and engines.intersection(announced.get("engines", ())):
                found.append(process)
    return found


def ready(process: Process) -> dict[str, Any]:
    """What it has announced, if it answers `kvfix dump`; empty if it does not."""
    try:
        announced = json.loads(own_text(process, Path(process.directory, f"kvfix-{process.pid}.ready")))
    except (OSError, ValueError):
        return {}
    return announced if isinstance(announced, dict) else {}


def own_text(process: Process, path: Path) -> str:
    """A file in the folder of this process. Raises OSError unless both belong to its user, and neither is a link.

    Whoever reads may be root: a planted folder must not have it signal a process, or show another file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # of a planted pipe nothing ever comes
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        handle = os.open(path.name, flags, dir_fd=folder)
        with os.fdopen(handle, encoding="utf-8") as file:
            if {os.fstat(folder).st_uid, os.fstat(handle).st_uid} != {process.owner}:
                raise PermissionError(f"{path} is not of the user of process {process.pid}")
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise PermissionError(f"{path} is no regular file")
            return file.read()
    finally:
        os.close(folder)


def _described(pid: int) -> Process | None:
    """None: no process, or gone meanwhile. What another user's process does not show is left empty."""
    if pid not in psutil.pids():
        return None
    try:
        shown = psutil.Process(pid).as_dict(["ppid", "name", "num_threads", "cmdline", "uids"])
        state, began = _state_and_start(pid)
    except (psutil.NoSuchProcess, OSError):
        return None
    environment, owner = _environment(pid), shown["uids"].effective
    shared = environment.get(DIRECTORY) or os.environ.get(DIRECTORY) or environment.get("TMPDIR") or "/tmp"
    return Process(
        pid=pid,
        parent=shown["ppid"],
        name=shown["name"],
        state=state,
        began=began,
        threads=shown["num_threads"],
        command=redact.command(word for word in shown["cmdline"] or () if word),
        settings={key: redact.setting(key, value) for key, value in environment.items() if key.startswith(_SHOWN)},
        owner=owner,
        directory=_own_folder(shared, owner),
    )


def _own_folder(shared: str, owner: int) -> str:
    """As connector_events/dump.py names it."""
    return os.path.join(shared, f"kvfix-{owner}")


def _state_and_start(pid: int) -> tuple[str, int]:
    """The kernel's letter, and the clock ticks by which a ready file names a process; psutil has neither."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _environment(pid: int) -> dict[str, str]:
    """psutil's ends at the first empty entry, and setproctitle leaves such in front of what it has not overwritten."""
    try:
        texts = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:  # another user's
        return {}
    return {key: value for key, _, value in (text.partition("=") for text in texts) if key}
