"""Write a recorder file at SIGUSR2 and, with KVFIX_DUMP_AT_EXIT=1, at exit. Announce this process to `kvfix dump`.

If the process already has a SIGUSR2 handler, kvfix installs no handler. kvfix's handler does not log, because the
signal may interrupt a log call.
"""

import atexit
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvfix.connector_events import recorder, violations
from kvfix.session import session

SIGNAL = signal.SIGUSR2
#: First characters of the lines that the watchdog reads from the recorder files of other processes.
_ASKED = (b'{"kind":"state"', b'{"kind":"stacks"')


def install() -> None:
    """Install the handler once. Python can install handlers only in the main thread."""
    if session.signal_installed or threading.current_thread() is not threading.main_thread():
        return
    session.signal_installed = True
    if os.environ.get("KVFIX_DUMP_AT_EXIT", "") not in ("", "0"):
        atexit.register(violations.written, recorder.write, "exit")
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, _on_signal):
        signal.signal(SIGNAL, _on_signal)
        announce()


def announce() -> None:
    """Announce this process and its engines if kvfix handles SIGUSR2. Without a handler, SIGUSR2 ends a process."""
    if session.signal_installed and signal.getsignal(SIGNAL) is _on_signal:
        violations.written(write_announcement)


def write_announcement() -> None:
    line = {"kind": "ready", "schema": recorder.SCHEMA, "pid": os.getpid(), "began": recorder.began()}
    with recorder.folder() as folder:
        ready = recorder.encode({**line, "engines": sorted(_engines())})
        session.announced.add(recorder.write_file(folder, f"kvfix-{os.getpid()}.ready", ready))
    atexit.unregister(withdraw)
    atexit.register(withdraw)


def _engines() -> set[str]:
    return {each.place["engine"] for each in recorder.connectors() if each.place}


def announced(descriptor: int) -> Iterator[int]:
    """Yield the pid of each other process that is announced in this folder and shares an engine with this process."""
    engines = _engines()
    for name in os.listdir(descriptor):
        if not name.endswith(".ready"):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):  # the process has just ended
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor), encoding="utf-8") as file:
                ready = json.load(file)
            pid = int(ready["pid"])
            if pid != os.getpid() and engines.intersection(ready["engines"]) and recorder.began(pid) == ready["began"]:
                yield pid


def withdraw() -> None:
    """Remove the announcements of this process."""
    while session.announced:
        recorder.remove(session.announced.pop())


def remove() -> None:
    """Remove the handler, unless another tool has replaced it."""
    if not session.signal_installed or threading.current_thread() is not threading.main_thread():
        return
    session.signal_installed = False
    if signal.getsignal(SIGNAL) is _on_signal:
        signal.signal(SIGNAL, signal.SIG_DFL)
    atexit.unregister(violations.written)
    withdraw()


def _on_signal(number: int, frame: Any) -> None:
    with suppress(Exception):  # the signal may interrupt any code
        recorder.write("signal")


def lines_of_others(seconds: float = 1.0) -> list[dict[str, Any]]:
    """Send SIGUSR2 to each other process of the same engines. Return states and stacks that these processes write."""
    found: list[dict[str, Any]] = []
    with suppress(OSError), recorder.folder() as (_, descriptor):
        before, asked = set(os.listdir(descriptor)), set[str]()
        for pid in announced(descriptor):
            os.kill(pid, SIGNAL)
            asked.add(str(pid))
        until = time.monotonic() + seconds  # a process whose main thread runs native code writes its file too late
        while asked and time.monotonic() < until:
            time.sleep(0.01)
            for name in sorted(set(os.listdir(descriptor)) - before):
                writer = name.removeprefix("kvfix-").partition("-")[0]
                if name.endswith("-signal.jsonl") and writer in asked:
                    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor), "rb") as file:
                        found += [json.loads(line) for line in file if line.startswith(_ASKED)]
                    asked.remove(writer)
    return found


# A forked child inherits the handler, but not the announcement (kvfix.session), and must not write a file at exit.
os.register_at_fork(after_in_child=lambda: atexit.unregister(violations.written))
