"""Runs code in the main thread of another Python process, between two of its bytecodes.

Python calls what is in its queue of pending calls there (`Py_AddPendingCall`). Putting a call into the queue takes one
short lock, neither the GIL nor memory: it may be done wherever the thread has stopped. The pending call is
`PyRun_SimpleString` with a line that executes a file. Python 3.14 does the same by itself (`sys.remote_exec`, PEP 768).

A thread that waits in a system call (a lock, a socket) comes to no bytecode. If it waits without the GIL, it takes the
GIL and runs the line there, as a callback from C does, and then waits on.

Nothing is loaded into the process. One page of memory is mapped, once, for the lines.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from contextlib import suppress

from kvfix_tools.look import other_process
from kvfix_tools.look.calls import Refused
from kvfix_tools.look.other_process import Process
from kvfix_tools.look.shared_folder import SharedFolder

__all__ = ["FAILED", "Refused", "Silent", "run"]

#: Begins an answer that is the error of the code.
FAILED = "failed: "
#: Where the page is in each process; it is free there in any layout of x86-64 and aarch64.
_PAGE, _SLOTS, _SLOT = 0x6B7600000000, 16, 256
#: Seconds for the code itself, once it has begun.
_LONGEST = 60.0
#: Folders for the answers, as `_new_folder` makes them.
_NAME = r"(/tmp|/dev/shm)/kvfix-look-\d+-\w+"

#: What the file `code` has. It begins only if it can take its token: after `seconds` the caller takes it.
_CODE = """
import os
folder, token, code = {folder!r}, {token!r}, {code!r}
try:
    os.unlink(folder + "/" + token)
    os.unlink(folder + "/code")
except OSError:
    pass
else:
    answer = folder + "/answer.part"
    os.close(os.open(answer, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        exec(compile(code, "<kvfix>", "exec"), {{"__name__": "<kvfix>", "ANSWER": answer}})
    except BaseException as error:
        with open(answer, "w", encoding="utf-8", errors="replace") as file:
            file.write({failed!r} + type(error).__name__ + ": " + str(error))
        if isinstance(error, (SystemExit, KeyboardInterrupt)):  # of a signal handler of the engine: hand it on
            import _thread, ctypes, time
            def again(thread=_thread.get_ident(), kind=type(error)):
                time.sleep(0.05)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
            _thread.start_new_thread(again, ())
    os.rename(answer, folder + "/answer")
"""
#: What it has after the caller has given up: the call is still in the queue. The folder goes at once, with what a
#: later caller may have written meanwhile: that one looks whether it is there.
_GIVEN_UP = """
import os
gone = {folder!r} + "-gone"
os.rename({folder!r}, gone)
for name in os.listdir(gone):
    os.unlink(gone + "/" + name)
os.rmdir(gone)
"""


class Silent(Exception):
    """The main thread did not come to a bytecode."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def run(pid: int, code: str, *, seconds: float) -> str:
    """Execute the code in the process; the text that it wrote to the file ANSWER, or FAILED and its error.

    The code must not wait and must take no lock: it may interrupt whoever has it. seconds: time for the main thread to
    come to a bytecode. Raises Refused or Silent. After Silent the folder stays until the thread comes to a bytecode:
    the next `run` uses it, so that a stuck process has one call in its queue and not many.
    """
    process = other_process.process(pid)
    lines = _Lines(process)
    folder = lines.waiting()
    if folder is not None:
        with suppress(FileNotFoundError):  # the call in the queue has run meanwhile
            return _run(process, lines, folder, code, seconds, is_queued=True)
    return _run(process, lines, _new_folder(process), code, seconds, is_queued=False)


def _run(process: Process, lines: _Lines, folder: SharedFolder, code: str, seconds: float, is_queued: bool) -> str:
    """As `run`. Raises FileNotFoundError if the folder of the call in the queue goes."""
    token = f"token-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.write(token, "")
        folder.write("code", _CODE.format(folder=folder.inside, token=token, code=code, failed=FAILED))
        line = f"try:exec(open({folder.inside + '/code'!r}).read(),{{}})\nexcept BaseException:pass\n"
        at = None
        if not _remote_exec(process, folder, line):
            at = lines.put(folder, line)
            if not process.run_waiting(at) and not is_queued:
                process.call("Py_AddPendingCall", process.address("PyRun_SimpleString"), at)
        text = _answer(process, folder, token, at, seconds)
    except Silent:
        raise
    except BaseException:
        folder.remove()
        raise
    folder.remove()
    return text


def _answer(process: Process, folder: SharedFolder, token: str, line: int | None, seconds: float) -> str:
    began, until, again, begun = time.monotonic(), time.monotonic() + seconds, 0.1, False
    while True:
        with suppress(FileNotFoundError):
            try:
                return folder.read("answer")
            except FileNotFoundError:
                raise
            except OSError as error:  # a link, a pipe, a file of another user
                raise Refused(f"the answer of process {process.pid} is no file of its user: {error}", "") from error
        if not folder.is_there() and process.is_alive():
            raise FileNotFoundError(folder.inside)
        if not process.is_alive():
            raise Refused(f"process {process.pid} has ended", "")
        if time.monotonic() >= until:
            if begun:
                raise Silent(f"the code has begun and has no answer yet after {_LONGEST:g} s")
            with suppress(FileNotFoundError):
                folder.unlink(token)
                folder.write("code", _GIVEN_UP.format(folder=folder.inside))
                raise Silent(f"its main thread came to no Python bytecode in {seconds:g} s: it is stuck in C")
            begun, until = True, time.monotonic() + _LONGEST
        if line is not None and time.monotonic() > began + again and folder.has(token):
            again *= 2
            process.run_waiting(line)
        time.sleep(min(0.02, 0.002 + (time.monotonic() - began) / 8))


class _Lines:
    """The page in the process: its first slot has the last folder, the others have a line each."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def waiting(self) -> SharedFolder | None:
        """The folder of a call that is still in the queue."""
        if not self._process.has_mapped(_PAGE):
            return None
        inside = self._process.read(_PAGE, _SLOT).partition(b"\0")[0].decode(errors="replace")
        if not re.fullmatch(_NAME, inside):
            return None
        with suppress(OSError):
            folder = SharedFolder(self._process.folder(inside.rpartition("/")[0]), inside, self._process.user)
            return folder if folder.is_of_user() and folder.has("code") else None
        return None

    def put(self, folder: SharedFolder, line: str) -> int:
        """Address of the line in the process."""
        process, text = self._process, line.encode() + b"\0"
        assert len(text) <= _SLOT
        if not process.has_mapped(_PAGE):
            # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            process.call("mmap", _PAGE, _SLOTS * _SLOT, 3, 0x100022, -1, 0)
            if not process.has_mapped(_PAGE):
                raise Refused(f"process {process.pid} got no memory for a line of code", "")
        slot = _PAGE + _SLOT * (1 + time.monotonic_ns() // 1000 % (_SLOTS - 1))
        process.write(slot, text)
        process.write(_PAGE, folder.inside.encode() + b"\0")
        return slot


def _remote_exec(process: Process, folder: SharedFolder, line: str) -> bool:
    """Whether Python did it itself: 3.14 in this process and in that one."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None or process.python() != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return False
    folder.write("line.py", line)
    try:
        remote_exec(process.pid, f"{folder.inside}/line.py")
    except (RuntimeError, OSError):  # switched off in that process
        return False
    return True


def _new_folder(process: Process) -> SharedFolder:
    """A fresh folder of the process's user, where the process sees it too."""
    for parent in ("/tmp", "/dev/shm"):
        with suppress(OSError):
            inside = f"{parent}/kvfix-look-{process.pid}-{secrets.token_hex(8)}"
            return SharedFolder.make(process.folder(parent), inside, process.user)
    raise Refused(
        f"process {process.pid} has no folder for the answer: neither /tmp nor /dev/shm can be written", "mount one"
    )
