"""Stop a thread of another process for a tenth of a millisecond, and call C functions in it."""

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing import Pipe
from pathlib import Path

from kvfix_tools.look import ptrace

#: Time limit of a call in seconds.
_SECONDS = 20.0


class Refused(Exception):
    """The call is not possible. setting: what the user can change; "" if nothing helps."""

    def __init__(self, reason: str, setting: str = "") -> None:
        super().__init__(f"{reason}. {setting}" if setting else reason)
        self.reason = reason
        self.setting = setting


#: Work in a stopped thread. The first argument calls a C function there; the others are numbers.
Work = Callable[..., int]


def call_one(call: Callable[..., int], address: int, *arguments: int) -> int:
    return call(address, *arguments)


def run_waiting(call: Callable[..., int], check: int, ensure: int, run: int, release: int, line: int) -> int:
    """Take the GIL in a waiting thread, and run a line of Python.

    A thread in a long wait without the GIL holds no lock of malloc or Python, so it may take the GIL. A thread that has
    left the wait may hold the GIL's mutex (`take_gil`, ceval_gil.h of CPython), and would wait for itself.
    """
    if call(check):
        return 0
    state = call(ensure)
    call(run, line)
    call(release, state)
    return 1


@lru_cache(maxsize=1)
def _cores() -> threading.Semaphore:
    """Limit the threads that are stopped at once, so that no stopped thread waits for a core."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


class _Stopper:
    """A child process that stops threads. If the user ends kvfix, the child still completes the call."""

    def __init__(self) -> None:
        self.pipe, there = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                with suppress(PermissionError):  # root only: a stopped thread must not wait for this to get a core
                    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
                for at in (0, 1, 2):
                    os.dup2(os.open(os.devnull, os.O_RDWR), at)
                for at in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, there.fileno()}:
                    with suppress(OSError):  # the descriptor of /proc/self/fd itself
                        os.close(at)
                while True:
                    there.send(_performed(*there.recv()))
            finally:  # the parent has closed its end
                os._exit(0)
        there.close()


#: The stoppers without work. A stopper that waits for a thread for ever is not in the list.
_STOPPERS: list[_Stopper] = []
os.register_at_fork(after_in_child=_STOPPERS.clear)


@atexit.register
def _end() -> None:
    while _STOPPERS:
        stopper = _STOPPERS.pop()
        os.kill(stopper.pid, signal.SIGKILL)  # it has no work
        os.waitpid(stopper.pid, 0)


def stop(thread: int, wait: str, trap: int, work: Work, *arguments: int) -> int | None:
    """Stop the thread, do the work in it, and let it run. Return None if it had left its wait. Raise Refused.

    wait: if the thread is not in this `system_call`, it is left alone. "": it may be anywhere. trap: address of a
    breakpoint instruction.
    """
    with _cores():
        stopper = _STOPPERS.pop() if _STOPPERS else _Stopper()
        try:
            stopper.pipe.send((thread, wait, trap, work, *arguments))
            if not stopper.pipe.poll(_SECONDS):
                reason = f"thread {thread} did not return from a call within {_SECONDS:g} s"
                raise Refused(reason, f"Do not end process {stopper.pid}: it waits for the thread.")
            answer: int | str | None = stopper.pipe.recv()
        except (EOFError, OSError) as error:
            raise Refused(f"thread {thread} cannot be called: process {stopper.pid} has ended") from error
        _STOPPERS.append(stopper)
    if isinstance(answer, str):
        raise Refused(f"thread {thread} cannot be called: {answer}")
    return answer


def _performed(thread: int, wait: str, trap: int, work: Work, *arguments: int) -> int | str | None:
    try:
        with ptrace.stopped(thread, trap) as stopped:
            if wait and not stopped.is_in(wait):
                return None
            return work(stopped.call, *arguments)
    except OSError as error:
        return str(error)


def system_call(thread: int) -> str:
    """Return the thread's system call: number, arguments, stack and code address. "" if it is in none or has ended."""
    with suppress(OSError):
        line = Path(f"/proc/{thread}/syscall").read_text().strip()
        return "" if line.startswith(("-1", "running")) else line
    return ""
