"""The processes of an engine, with their settings of vLLM, LMCache and kvfix, without secrets.

kvfix reads the stacks of each process with py-spy, and its flight recorder with the signal SIGUSR2.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvfix.connector_events.recorder import DIRECTORY
from kvfix.engine_state.places import HOOKS
from kvfix_tools import recording, redact
from kvfix_tools.look.shared_folder import SharedFolder

_SHOWN = ("KVFIX", "VLLM_", "LMCACHE_", "PYTHONHASHSEED")
STACKS, RECORDER = 20, 5.0  # time limits in seconds: for the stacks and for the recorder of one process


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    state: str
    began: int  # clock ticks after boot
    threads: int
    command: list[str]
    settings: dict[str, str]  # from the environment with which the process started
    owner: int  # user id
    directory: str  # the folder for its recorder files


def tree(pid: int) -> list[Process]:
    """Return this process and all its descendants, parents first. Empty if the process does not exist.

    vLLM names its processes (setproctitle), which overwrites a part of the environment that /proc shows. The missing
    settings are taken from the parent. Ray sets the environment of a worker after its start, so /proc does not show it.
    For Ray's workers, kvfix takes the folder from KVFIX_DUMP_DIR in the environment of `kvfix dump`.
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
    """Return the engine's processes on this node that `tree` lacks, such as Ray's workers, the children of a raylet."""
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
    """Return the content of the file by which a process announces that it answers `kvfix dump`; {} without a file."""
    try:
        announced = json.loads(own_text(process, Path(process.directory, f"kvfix-{process.pid}.ready")))
    except (OSError, ValueError):
        return {}
    return announced if isinstance(announced, dict) else {}


def own_text(process: Process, path: Path) -> str:
    """Read a file of this process. Raise OSError for a link, or if another user owns the file or its folder."""
    # kvfix may run as root. A folder of another user must not make kvfix signal a process or show another file.
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    shared = SharedFolder(folder, process.owner)
    if os.fstat(folder).st_uid != process.owner:
        raise PermissionError(f"{path.parent} does not belong to the user of process {process.pid}")
    return shared.read(str(path))


def _described(pid: int) -> Process | None:
    """Describe a process; None if it does not exist. Fields that kvfix may not read stay empty."""
    if pid not in psutil.pids():
        return None
    try:
        shown = psutil.Process(pid).as_dict(["ppid", "name", "num_threads", "cmdline", "uids"])
        # Fields 3 and later of proc_pid_stat. psutil has neither the kernel's state letter nor the start in ticks.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (psutil.NoSuchProcess, OSError):
        return None
    # psutil stops at the first empty entry of the environment, and setproctitle leaves empty entries.
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
    """Return the folder that connector_events/recorder.py makes for this user."""
    return os.path.join(shared, f"kvfix-{owner}")


def proc_text(pid: int, name: str) -> str:
    """Read a file of /proc; "" if the process belongs to another user or has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def gather(tree: list[Process]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return (a row of the summary for each process, {file of the bundle: its text})."""
    # Read the recorders before the stacks, because a process does not answer while py-spy stops it.
    with ThreadPoolExecutor(max(1, len(tree))) as pool:
        recorded = list(pool.map(recorder, tree))
    rows, files = [], {}
    for process, (text, why_no_recorder) in zip(tree, recorded, strict=True):
        stacks_file, recorder_file = f"stacks-{process.pid}.json", f"recorder-{process.pid}.jsonl"
        threads, why_no_stacks = stacks(process.pid)
        if threads is not None:
            files[stacks_file] = json.dumps(threads, indent=1)
        if text is not None:
            files[recorder_file] = text
        connectors, is_read = _connectors(text or ""), threads is not None or text is not None
        row = {name: getattr(process, name) for name in ("pid", "parent", "name", "state", "threads")}
        row |= {"ranks": ranks(connectors), "hook": where(threads or [], connectors) if is_read else None}
        row |= {"stacks": why_no_stacks or stacks_file, "recorder": why_no_recorder or recorder_file}
        rows.append(row)
    return rows, files


def program(name: str) -> str | None:
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(folders))


def stacks(pid: int) -> tuple[list[dict[str, Any]] | None, str]:
    """Return (py-spy's threads of this process, ""), or (None, the reason)."""
    py_spy = program("py-spy")
    if py_spy is None:
        return None, "py-spy is not installed. Run: pip install py-spy"
    command = [py_spy, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACKS, check=False)
        if done.returncode == 0:
            return list(json.loads(done.stdout)), ""
        lines = done.stderr.partition("Stack backtrace:")[0].strip().splitlines()
        return None, re.sub(r"^\s*\d+: ", "", lines[-1]) if lines else f"py-spy ended with exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        return None, f"py-spy did not finish in {STACKS} s"
    except (OSError, json.JSONDecodeError) as error:
        return None, f"py-spy: {error}"


def recorder(process: Process) -> tuple[str | None, str]:
    """Return (text of the recorder file that the process writes at a signal, ""), or (None, the reason)."""
    announced = ready(process)
    if not announced:
        return None, "no recorder: the process has no connector, or was started without `kvfix run --mode observe`"
    if announced.get("began") != process.began:
        return None, "no recorder: the recorder with this process id belongs to a process that has ended"
    before = _files(process)
    try:
        os.kill(process.pid, signal.SIGUSR2)
    except OSError as error:
        return None, f"no recorder: the process cannot be signalled ({error.strerror})"
    until = time.monotonic() + RECORDER
    while time.monotonic() < until:
        if new := sorted(_files(process) - before):
            try:
                return own_text(process, new[-1]), ""
            except OSError as error:
                return None, f"no recorder: the file cannot be read ({error})"
        time.sleep(0.02)
    return None, f"no recorder: the main thread did not run Python code for {RECORDER:g} s; see its stacks"


def _files(process: Process) -> set[Path]:
    return set(Path(process.directory).glob(f"kvfix-{process.pid}-*-signal.jsonl"))


def ranks(connectors: list[dict[str, Any]]) -> list[str]:
    """Return the roles of a process's connectors, such as "scheduler of 0a1b2" or "rank 1 of 2 of 0a1b2"."""
    known, rank = (line for line in connectors if line.get("engine")), "rank {rank} of {ranks} of {engine}"
    return sorted({(rank if line["role"] == "WORKER" else "scheduler of {engine}").format(**line) for line in known})


def _connectors(recorder: str) -> list[dict[str, Any]]:
    try:
        return list(recording.parsed("recorder", recorder.encode().splitlines()).connectors.values())
    except ValueError:
        return []


def main_frames(threads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames of the main thread, the innermost first; [] if py-spy did not find the thread."""
    for each in threads:
        if each.get("thread_name") == "MainThread" or each.get("os_thread_id") == each.get("pid"):
            return list(each["frames"])
    return []


def where(threads: list[dict[str, Any]], connectors: list[dict[str, Any]]) -> str:
    """Return the connector hook in which the process is, for how long and at which line; "" outside of all hooks."""
    frames = main_frames(threads)
    line = f", at {frames[0]['name']} ({frames[0]['filename']}:{frames[0]['line']})" if frames else ""
    inside = [each for each in connectors if each.get("inside")]
    if inside:  # the innermost hook began last
        last = min(inside, key=lambda each: each["seconds"])
        return f"in {last['inside']} of {last['name']} for {last['seconds']:.1f} s{line}"
    for frame in frames:
        if frame["name"].rpartition(".")[2] in HOOKS:  # py-spy writes "Class.name" from Python 3.11 on
            return f"in {frame['name']} ({frame['short_filename']}:{frame['line']}){line}"
    return ""
