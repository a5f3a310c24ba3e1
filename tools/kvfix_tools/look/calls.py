"""C functions called in the main thread of another process, which is stopped for that.

By pyinjector, which stops this one thread for less than a millisecond, or by gdb, which stops all.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

#: Seconds for a call; gdb takes a quarter of one.
_SECONDS = 20.0


class Refused(Exception):
    """setting: what to change, "" if nothing can be."""

    def __init__(self, reason: str, setting: str = "") -> None:
        super().__init__(f"{reason}. {setting}" if setting else reason)
        self.reason = reason
        self.setting = setting


class Call(NamedTuple):
    address: int
    arguments: tuple[int, ...]

    def perform(self, call: Callable[..., int]) -> int:
        return call(self.address, *self.arguments)

    def commands(self) -> str:
        """For gdb. The other threads stand still meanwhile."""
        return f"set scheduler-locking on\nprint {_expression(self.address, *self.arguments)}\n"


class RunWaiting(NamedTuple):
    """In a long wait without the GIL no lock of malloc or of Python is held: the thread may take the GIL.

    wait: `system_call` during that wait. A thread that is in another one when it is stopped has gone on. It may be
    about to take the GIL, with the GIL's own mutex held (`take_gil`, ceval_gil.h of CPython): it would wait for itself.
    """

    pid: int
    wait: str
    check: int
    ensure: int
    run: int
    release: int
    line: int

    def perform(self, call: Callable[..., int]) -> int:
        if system_call(self.pid) != self.wait or call(self.check):
            return 0
        state = call(self.ensure)
        call(self.run, self.line)
        call(self.release, state)
        return 1

    def commands(self) -> str:
        return f"""set $waits = 0
shell grep -qxF '{self.wait}' /proc/{self.pid}/syscall
if $_shell_exitcode == 0
  set $waits = {_expression(self.check)} == 0
end
if $waits
  set $state = {_expression(self.ensure)}
  set $ran = {_expression(self.run, self.line)}
  set $ran = {_expression(self.release, "$state")}
end
print $waits
"""


def _expression(address: int, *arguments: int | str) -> str:
    types = ",".join("long" for _ in arguments) or "void"
    return f"((int(*)({types})){address})({','.join(map(str, arguments))})"


@lru_cache(maxsize=1)
def _cores() -> threading.Semaphore:
    """So many processes are stopped at once: each for as long as its maps take to read, not until it has a core too."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


def stop(pid: int, work: Call | RunWaiting) -> int:
    """Stop the main thread, have it do this, and let it go on. Raises Refused."""
    if find_spec("pyinjector") is not None:
        with _cores():
            return _in_child(pid, work)
    if shutil.which("gdb") is not None:
        return _by_gdb(pid, work)
    raise Refused("there is neither pyinjector nor gdb here", "pip install pyinjector, or install gdb.")


def _in_child(pid: int, work: Call | RunWaiting) -> int:
    """By pyinjector in a process of its own: whoever ends this one must not end the call that it has begun."""
    spec = find_spec("pyinjector.injector")
    library = ctypes.CDLL(spec.origin if spec is not None else None)
    library.injector_error.restype = ctypes.c_char_p
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.write(writes, _by_pyinjector(library, pid, work).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        if not select.select([reads], [], [], _SECONDS)[0]:
            raise Refused(
                f"no thread of process {pid} gives up the GIL", f"Leave process {child} alone: it waits for it."
            )
        output = answer.read()
    os.waitpid(child, 0)
    if not output.lstrip("-").isdecimal():
        raise Refused(f"process {pid} cannot be called: {output}", "")
    return int(output)


def _by_pyinjector(library: ctypes.CDLL, pid: int, work: Call | RunWaiting) -> str:
    """By the C functions of kubo's injector, which pyinjector contains; it itself only loads libraries. The answer."""
    injector, answer = ctypes.c_void_p(), ctypes.c_ssize_t()

    def call(address: int, *arguments: int) -> int:
        given = [ctypes.c_ssize_t(each) for each in arguments]
        if library.injector_remote_call(injector, ctypes.byref(answer), ctypes.c_size_t(address), *given):
            raise OSError(library.injector_error().decode())
        return ctypes.c_int32(answer.value).value

    try:
        if library.injector_attach(ctypes.byref(injector), pid):
            return str(library.injector_error().decode())
        try:
            return str(work.perform(call))
        finally:
            library.injector_detach(injector)
    except OSError as error:
        return str(error)


def system_call(pid: int) -> str:
    """In which one the main thread is: number, arguments, stack pointer, place. "": in none, or it has ended."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/syscall").read_text().strip()
        return "" if line.startswith(("-1", "running")) else line
    return ""


def _by_gdb(pid: int, work: Call | RunWaiting) -> int:
    commands = f"""set auto-solib-add off
set auto-load no
set debuginfod enabled off
set print thread-events off
set unwindonsignal on
file /proc/{pid}/exe
attach {pid}
{work.commands()}detach
"""
    with tempfile.NamedTemporaryFile("w", suffix=".gdb") as script:
        script.write(commands)
        script.flush()
        output = _output(pid, work, script.name)
    found = re.search(r"^\$\d+ = (-?\d+)", output, re.MULTILINE)
    if found is None:
        raise Refused(f"gdb could not call into process {pid}: {' '.join(output.split())[-300:]}")
    return int(found[1])


def _output(pid: int, work: Call | RunWaiting, script: str) -> str:
    gdb = subprocess.Popen(
        ["gdb", "-nx", "-batch", "-readnever", "-x", script],
        start_new_session=True,  # a ctrl-C for this process must not end the call
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return gdb.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        if isinstance(work, RunWaiting):
            reason = f"no thread of process {pid} gives up the GIL"
            raise Refused(reason, f"Leave gdb (process {gdb.pid}) alone: it waits for it.") from None
        gdb.send_signal(signal.SIGINT)  # it ends the call, and puts the thread back to where it was
        return gdb.communicate()[0]
