"""Find the processes of an engine, and read their settings of vLLM, LMCache and kvfix without secrets."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvfix.connector_events.recorder import DIRECTORY
from kvfix_tools import redact
from kvfix_tools.look.shared_folder import SharedFolder

_SHOWN = ("KVFIX", "VLLM_", "LMCACHE_", "PYTHONHASHSEED")


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    state: str
    began: int  # start time in clock ticks after boot
    threads: int
    command: list[str]
    settings: dict[str, str]  # from the environment with which the process started
    owner: int  # user id
    directory: str  # the folder for the process's recorder files


def tree(pid: int) -> list[Process]:
    """Return this process and all its descendants, parents first, or [] if the process does not exist.

    vLLM sets process titles (setproctitle). A title overwrites a part of the environment in /proc, so kvfix takes
    missing settings from the parent. If the parent lacks KVFIX_DUMP_DIR too, kvfix reads its own environment.
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
    """Return the engine's processes on this node that `tree` lacks, such as children of Ray's daemon."""
    engines = {engine for process in tree for engine in ready(process).get("engines", ())}
    found: list[Process] = []
    for directory in dict.fromkeys(process.directory for process in tree):
        for path in sorted(Path(directory).glob("kvfix-*.ready")):
            pid = path.stem.rpartition("-")[2]
            process = _described(int(pid)) if pid.isdecimal() else None
            if process is None or process.pid in {each.pid for each in [*tree, *found]}:
                continue
            # Ray sets a worker's environment after the worker has started, so /proc does not show KVFIX_DUMP_DIR.
            process = process._replace(directory=directory)
            announced = ready(process)
            if announced.get("began") == process.began and engines.intersection(announced.get("engines", ())):
                found.append(process)
    return found


def ready(process: Process) -> dict[str, Any]:
    """Return the content of the process's .ready file, or {}. A process with this file answers `kvfix dump`."""
    try:
        announced = json.loads(own_text(process, Path(process.directory, f"kvfix-{process.pid}.ready")))
    except (OSError, ValueError):
        return {}
    return announced if isinstance(announced, dict) else {}


def own_text(process: Process, path: Path) -> str:
    """Read a file of this process. Raise OSError for a link, or if another user owns the file or the folder."""
    # kvfix may run as root. A file of another user must not make kvfix signal a process or reveal a private file.
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    shared = SharedFolder(folder, process.owner)
    if os.fstat(folder).st_uid != process.owner:
        raise PermissionError(f"{path.parent} does not belong to the user of process {process.pid}")
    return shared.read(str(path))


def _described(pid: int) -> Process | None:
    """Return None if the process does not exist. Fields that kvfix may not read stay empty."""
    if pid not in psutil.pids():
        return None
    try:
        shown = psutil.Process(pid).as_dict(["ppid", "name", "num_threads", "cmdline", "uids"])
        # Read /proc/PID/stat from field 3 on, because psutil offers no kernel state letter and no start in ticks.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (psutil.NoSuchProcess, OSError):
        return None
    # psutil stops at the first empty entry of the environment, but setproctitle leaves empty entries.
    entries = (entry.partition("=") for entry in proc_text(pid, "environ").split("\0"))
    environment, owner = {key: value for key, _, value in entries if key}, shown["uids"].effective
    shared = environment.get(DIRECTORY) or os.environ.get(DIRECTORY) or environment.get("TMPDIR") or "/tmp"
    return Process(
        pid=pid,
        parent=shown["ppid"],
        name=shown["name"],
        state=fields[0],
        began=int(fields[19]),
        threads=shown["num_threads"],
        command=redact.command(word for word in shown["cmdline"] or () if word),
        settings={key: redact.setting(key, value) for key, value in environment.items() if key.startswith(_SHOWN)},
        owner=owner,
        directory=_own_folder(shared, owner),
    )


def _own_folder(shared: str, owner: int) -> str:
    """Return the folder that connector_events/recorder.py creates for this user."""
    return os.path.join(shared, f"kvfix-{owner}")


def proc_text(pid: int, name: str) -> str:
    """Read a file in /proc. Return "" if the process belongs to another user or has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
