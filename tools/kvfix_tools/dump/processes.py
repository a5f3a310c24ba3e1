"""The processes of an engine, from /proc; settings of vLLM, LMCache and kvfix, without secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from kvfix import redact
from kvfix.probes.dump import DIRECTORY

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
    is missing there is what the parent was started with. Ray's workers are told theirs later: it is not there either,
    and the one of `kvfix dump` itself is taken.
    """
    everyone = {each.pid: each for entry in Path("/proc").iterdir() if (each := _read(entry)) is not None}
    wanted, found = [pid], list[Process]()
    while wanted:
        parent = wanted.pop(0)
        if parent in everyone:
            process = everyone[parent]
            above = next((each for each in found if each.pid == process.parent), None)
            if above is not None and DIRECTORY not in process.settings:
                settings = {**above.settings, **process.settings}
                shared = os.path.dirname(above.directory)
                process = process._replace(settings=settings, directory=_own_folder(shared, process.owner))
            found.append(process)
            wanted += sorted(each.pid for each in everyone.values() if each.parent == parent)
    return found


def elsewhere(tree: list[Process]) -> list[Process]:
    """Those of the same engine on this node that are not below it: Ray's workers are below its raylet."""
    engines = {engine for process in tree for engine in ready(process).get("engines", ())}
    found: list[Process] = []
    for directory in dict.fromkeys(process.directory for process in tree):
        for path in sorted(Path(directory).glob("kvfix-*.ready")):
            process = _read(Path("/proc", path.stem.rpartition("-")[2]))
            if process is None or process.pid in {each.pid for each in [*tree, *found]}:
                continue
            process = process._replace(directory=directory)
            said = ready(process)
            if said.get("began") == process.began and engines.intersection(said.get("engines", ())):
                found.append(process)
    return found


def ready(process: Process) -> dict[str, Any]:
    """What it has announced, if it answers `kvfix dump`; empty if it does not."""
    try:
        said = json.loads(own_text(process, Path(process.directory, f"kvfix-{process.pid}.ready")))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def own_text(process: Process, path: Path) -> str:
    """A file in the folder of this process. Raises OSError unless both belong to its user, and neither is a link.

    Whoever reads may be root: a planted folder must not have it signal a process, or show another file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        handle = os.open(path.name, flags, dir_fd=folder)
        with os.fdopen(handle, encoding="utf-8") as file:
            if {os.fstat(folder).st_uid, os.fstat(handle).st_uid} != {process.owner}:
                raise PermissionError(f"{path} is not of the user of process {process.pid}")
            return file.read()
    finally:
        os.close(folder)


def _read(entry: Path) -> Process | None:
    """None: no process, or gone meanwhile."""
    if not entry.name.isdigit():
        return None
    try:
        stat = (entry / "stat").read_text(errors="replace")
        command = (entry / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None
    name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 1 :].split()
    environment = _environment(entry)
    owner = _owner(entry)
    settings = {key: redact.setting(key, value) for key, value in environment.items() if key.startswith(_SHOWN)}
    return Process(
        pid=int(entry.name),
        parent=int(rest[1]),
        name=name,
        state=rest[0],
        began=int(rest[19]),
        threads=int(rest[17]),
        command=redact.command(word for word in command if word),
        settings=settings,
        owner=owner,
        directory=_own_folder(
            environment.get(DIRECTORY) or os.environ.get(DIRECTORY) or environment.get("TMPDIR") or "/tmp", owner
        ),
    )


def _own_folder(shared: str, owner: int) -> str:
    """As probes/dump.py names it."""
    return os.path.join(shared, f"kvfix-{owner}")


def _environment(entry: Path) -> dict[str, str]:
    try:
        texts = (entry / "environ").read_text(errors="replace").split("\0")
    except OSError:  # another user's
        return {}
    return {key: value for key, _, value in (text.partition("=") for text in texts) if key}


def _owner(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return 0
