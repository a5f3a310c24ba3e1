"""Run code in the main thread of another Python process, between two bytecodes of the thread.

Between two bytecodes, Python runs the calls that `Py_AddPendingCall` has queued. `Py_AddPendingCall` takes one short
lock, but does not take the GIL or allocate memory. So kvfix can call this function wherever the thread has stopped.
kvfix queues a call of `PyRun_SimpleString` with a line that executes a file. From Python 3.14 on, kvfix prefers
`sys.remote_exec` (PEP 768).

A thread that waits in a system call (a lock, a socket) reaches no bytecode. If the thread waits without the GIL, kvfix
makes the thread take the GIL and run the line, as a callback from C does. kvfix maps a page that holds the lines.
"""

import os
import re
import secrets
import sys
import time
from contextlib import suppress

from kvfix_tools.look import other_process
from kvfix_tools.look.other_process import Process
from kvfix_tools.look.ptrace import Refused as Refused
from kvfix_tools.look.shared_folder import SharedFolder

#: Prefix of an answer if the code has raised an error. The rest of the answer is the error.
FAILED = "failed: "
#: _PAGE: address of the page (free on x86-64 and aarch64). _SLOTS: number of slots. _SLOT: bytes of each slot.
_PAGE, _SLOTS, _SLOT = 0x6B7600000000, 16, 256
_LONGEST = 60.0  # time limit in seconds for the code, after it has begun
_FOLDERS = ("/tmp", "/dev/shm")  # folders in which kvfix puts the script and the answer
_SCRIPT = r"(/tmp|/dev/shm)/kvfix-look-\d+-\w+"
#: The script runs the code only if the token file can be renamed. After `seconds`, the caller removes the token file.
_CODE = """
import os
script, token, code = {script!r}, {token!r}, {code!r}
answer = token + ".part"
try:
    os.rename(token, answer)
    os.unlink(script)
except OSError:
    pass
else:
    try:
        exec(compile(code, "<kvfix>", "exec"), {{"__name__": "<kvfix>", "ANSWER": answer}})
    except BaseException as error:
        with open(answer, "w", encoding="utf-8", errors="replace") as file:
            file.write({failed!r} + type(error).__name__ + ": " + str(error))
        if isinstance(error, (SystemExit, KeyboardInterrupt)):  # from a signal handler of the engine: raise it again
            import _thread, ctypes, time
            def again(thread=_thread.get_ident(), kind=type(error)):
                time.sleep(0.05)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
            _thread.start_new_thread(again, ())
    os.rename(answer, token + ".answer")
"""
#: After a timeout, the call stays in the queue, so kvfix replaces the script by this code. The code clears the path in
#: the page and removes the script. If the code runs during a later `run`, that `run` makes a new script.
_GIVEN_UP = f"import ctypes, os; ctypes.memset({_PAGE}, 0, 1); os.unlink({{script!r}})"


class Silent(Exception):
    """The main thread reached no bytecode, or the code did not answer in time. The text has the reason."""


def run(pid: int, code: str, *, seconds: float) -> str:
    """Execute the code in the process. Return the text that the code wrote to ANSWER, or FAILED and the error.

    The code must not wait or take a lock, because the interrupted thread may hold the lock. Raise Refused if the call
    is not possible. Raise Silent if the code does not begin within `seconds`, or runs for _LONGEST. A call that has
    not begun stays in the queue. The next `run` uses this call, so that a stuck process has only one call in its queue.
    """
    process = other_process.process(pid)
    if queued := _queued(process):
        with suppress(FileNotFoundError):  # the call in the queue has run in the meantime
            return _run(process, *queued, code, seconds, is_queued=True)
    return _run(process, *_new_script(process), code, seconds, is_queued=False)


def _run(process: Process, folder: SharedFolder, script: str, code: str, seconds: float, is_queued: bool) -> str:
    """Let the process run the code. Return the answer. Raise FileNotFoundError if an old call removed the script."""
    token = f"{script}.{os.getpid()}-{time.monotonic_ns()}"
    files = [script, f"{script}.py", token, f"{token}.part", f"{token}.answer"]
    try:
        folder.write(token, "")
        folder.write(script, _CODE.format(script=script, token=token, code=code, failed=FAILED))
        if is_queued and process.read(_PAGE, 1) == b"\0":
            raise FileNotFoundError(script)
        line = f"try:exec(open({script!r}).read(),{{}})\nexcept BaseException:pass\n"
        at = None
        if not _remote_exec(process, folder, f"{script}.py", line):
            at = _put(process, script, line)
            if not process.run_waiting(at) and not is_queued:
                process.call("Py_AddPendingCall", process.address("PyRun_SimpleString"), at)
        return _answer(process, folder, script, token, at, seconds)
    except Silent:
        files = []
        raise
    finally:
        for path in files:
            with suppress(OSError):
                folder.unlink(path)


def _answer(process: Process, folder: SharedFolder, script: str, token: str, line: int | None, seconds: float) -> str:
    began, until, again, begun = time.monotonic(), time.monotonic() + seconds, 0.1, False
    while True:
        try:
            return folder.read(f"{token}.answer")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise Refused(f"process {process.pid} sent a link, pipe or another user's file: {error}") from error
        if not process.is_alive():
            raise Refused(f"process {process.pid} has ended", "")
        if not folder.has(script) and folder.has(token):
            raise FileNotFoundError(script)
        if time.monotonic() >= until:
            if begun:
                raise Silent(f"the code of kvfix has begun, but has not answered in {_LONGEST:g} s")
            with suppress(FileNotFoundError):
                folder.unlink(token)
                folder.write(script, _GIVEN_UP.format(script=script))
                raise Silent(f"the main thread ran no Python bytecode in {seconds:g} s, so it is stuck in native code")
            begun, until = True, time.monotonic() + _LONGEST
        if line is not None and time.monotonic() > began + again and folder.has(token):
            again *= 2
            process.run_waiting(line)
        time.sleep(min(0.02, 0.002 + (time.monotonic() - began) / 8))


def _queued(process: Process) -> tuple[SharedFolder, str] | None:
    """Return the folder and the script of the call that is still in the queue, or None if no call is in the queue."""
    if not process.has_mapped(_PAGE):
        return None
    script = process.read(_PAGE, _SLOT).partition(b"\0")[0].decode(errors="replace")
    if re.fullmatch(_SCRIPT, script):
        with suppress(OSError):
            folder = process.folder(os.path.dirname(script))
            return (folder, script) if folder.has(script) else None
    return None


def _put(process: Process, script: str, line: str) -> int:
    """Write the line into a slot of the page, and return the slot's address. The first slot has the script's path."""
    text = line.encode() + b"\0"
    assert len(text) <= _SLOT
    if not process.has_mapped(_PAGE):
        # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        process.call("mmap", _PAGE, _SLOTS * _SLOT, 3, 0x100022, -1, 0)
        if not process.has_mapped(_PAGE):
            raise Refused(f"process {process.pid} could not map memory for a line of code", "")
    slot = _PAGE + _SLOT * (1 + time.monotonic_ns() // 1000 % (_SLOTS - 1))
    process.write(slot, text)
    process.write(_PAGE, script.encode() + b"\0")
    return slot


def _remote_exec(process: Process, folder: SharedFolder, path: str, line: str) -> bool:
    """Use `sys.remote_exec`, and return True. Return False on failure. Both processes need the same Python >= 3.14."""
    remote_exec = getattr(sys, "remote_exec", None)
    if remote_exec is None or process.python() != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return False
    folder.write(path, line)
    try:
        remote_exec(process.pid, path)
    except (RuntimeError, OSError):  # the process has disabled remote_exec
        return False
    return True


def _new_script(process: Process) -> tuple[SharedFolder, str]:
    """Return a folder that the process can see and kvfix can write, and the path of a new script in the folder."""
    for place in _FOLDERS:
        with suppress(OSError):
            folder, script = process.folder(place), f"{place}/kvfix-look-{process.pid}-{secrets.token_hex(8)}"
            folder.write(script, "")
            return folder, script
    reason = f"process {process.pid} has no folder for the answer: neither /tmp nor /dev/shm can be written"
    raise Refused(reason, "Mount a writable /tmp.")
