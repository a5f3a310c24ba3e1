"""Read the stacks of each process with py-spy. Send SIGUSR2, so that each process writes its flight recorder file."""

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
from typing import Any

from kvfix.engine_state.places import HOOKS
from kvfix_tools import recording
from kvfix_tools.dump.processes import Process, own_text, ready

STACKS, RECORDER = 20, 5.0  # time limits in seconds for the stacks and for the recorder of one process


def gather(tree: list[Process]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a summary row for each process, and the text of each file in the bundle."""
    # Read the recorder files before the stacks, because py-spy pauses a process, and a paused process writes no file.
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
    """Return (threads of this process in py-spy's output, ""), or (None, why py-spy shows no threads)."""
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
    """Return (text of the recorder file that the process writes after SIGUSR2, ""), or (None, why no file exists)."""
    announced = ready(process)
    if not announced:
        return None, "no recorder: the process has no connector, or was started without `kvfix run --mode observe`"
    if announced.get("began") != process.began:
        return None, f"no recorder: an ended process with the same id wrote the file kvfix-{process.pid}.ready"
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
    """Return each connector's role and engine id, such as "scheduler of 0a1b2" or "rank 1 of 2 of 0a1b2"."""
    known, rank = (line for line in connectors if line.get("engine")), "rank {rank} of {ranks} of {engine}"
    return sorted({(rank if line["role"] == "WORKER" else "scheduler of {engine}").format(**line) for line in known})


def _connectors(recorder: str) -> list[dict[str, Any]]:
    try:
        return list(recording.parsed("recorder", recorder.encode().splitlines()).connectors.values())
    except ValueError:
        return []


def main_frames(threads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames of the main thread, innermost first, or [] if py-spy did not find the main thread."""
    for each in threads:
        if each.get("thread_name") == "MainThread" or each.get("os_thread_id") == each.get("pid"):
            return list(each["frames"])
    return []


def where(threads: list[dict[str, Any]], connectors: list[dict[str, Any]]) -> str:
    """Return the running connector method (hook), its recorded duration, and the current line, or "" if none runs."""
    frames = main_frames(threads)
    line = f", at {frames[0]['name']} ({frames[0]['filename']}:{frames[0]['line']})" if frames else ""
    inside = [each for each in connectors if each.get("inside")]
    if inside:  # the hook that began last is the innermost hook
        last = min(inside, key=lambda each: each["seconds"])
        return f"in {last['inside']} of {last['name']} for {last['seconds']:.1f} s{line}"
    for frame in frames:
        if frame["name"].rpartition(".")[2] in HOOKS:  # since Python 3.11, py-spy writes "Class.name"
            return f"in {frame['name']} ({frame['short_filename']}:{frame['line']}){line}"
    return ""
