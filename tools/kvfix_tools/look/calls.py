"""Stop a thread of another process for a tenth of a millisecond, and call C functions in it."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple, cast

from kvfix_tools.look import ptrace

#: Time limit of a call in seconds.
_SECONDS = 20.0


class Refused(Exception):
    """The call is not possible. setting: what the user can change; "" if nothing helps."""

    def __init__(self, reason: str, setting: str = "") -> None:
        super().__init__(f"{reason}. {setting}" if setting else reason)
        self.reason = reason
        self.setting = setting


class Thread(NamedTuple):
    """A thread to stop.

    wait: if the thread is not in this `system_call`, it is left alone. "": it may be anywhere. trap: address of a
    breakpoint instruction.
    """

    number: int
    wait: str
    trap: int


class Call(NamedTuple):
    address: int
    arguments: tuple[int, ...]

    def perform(self, call: Callable[..., int]) -> int:
        return call(self.address, *self.arguments)


class RunWaiting(NamedTuple):
    """Take the GIL in a waiting thread, and run a line of Python.

    A thread in a long wait without the GIL holds no lock of malloc or Python, so it may take the GIL. A thread that has
    left the wait may hold the GIL's mutex (`take_gil`, ceval_gil.h of CPython), and would wait for itself.
    """

    check: int
    ensure: int
    run: int
    release: int
    line: int

    def perform(self, call: Callable[..., int]) -> int:
        if call(self.check):
            return 0
        state = call(self.ensure)
        call(self.run, self.line)
        call(self.release, state)
        return 1


@lru_cache(maxsize=1)
def _cores() -> threading.Semaphore:
    """Limit the threads that are stopped at once, so that no stopped thread waits for a core."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


class _Stopper:
    """A child process that stops threads. If the user ends kvfix, the child still completes the call."""

    def __init__(self) -> None:
        self._pipe, there = Pipe()
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

    def stop(self, thread: Thread, work: Call | RunWaiting) -> int | str | None:
        """Return the result, or a text with the reason of a failure. Raise TimeoutError."""
        self._pipe.send((thread, work))
        if not self._pipe.poll(_SECONDS):
            raise TimeoutError
        return cast("int | str | None", self._pipe.recv())

    def end(self) -> None:
        """End the child process, which has no work."""
        self._pipe.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


#: The stoppers without work. A stopper that waits for a thread for ever is not in the list.
_STOPPERS: list[_Stopper] = []
os.register_at_fork(after_in_child=_STOPPERS.clear)


@atexit.register
def _end() -> None:
    while _STOPPERS:
        _STOPPERS.pop().end()


def stop(thread: Thread, work: Call | RunWaiting) -> int | None:
    """Stop the thread, do the work in it, and let it run. Return None if it had left its wait. Raise Refused."""
    with _cores():
        return _by_stopper(thread, work)


def _by_stopper(thread: Thread, work: Call | RunWaiting) -> int | None:
    stopper = _STOPPERS.pop() if _STOPPERS else _Stopper()
    try:
        answer = stopper.stop(thread, work)
    except TimeoutError:
        reason = f"thread {thread.number} did not return from a call within {_SECONDS:g} s"
        raise Refused(reason, f"Do not end process {stopper.pid}: it waits for the thread.") from None
    except (EOFError, OSError) as error:
        raise Refused(f"thread {thread.number} cannot be called: process {stopper.pid} has ended") from error
    _STOPPERS.append(stopper)
    if isinstance(answer, str):
        raise Refused(f"thread {thread.number} cannot be called: {answer}")
    return answer


def _performed(thread: Thread, work: Call | RunWaiting) -> int | str | None:
    try:
        with ptrace.stopped(thread.number, thread.trap) as stopped:
            if thread.wait and not stopped.is_in(thread.wait):
                return None
            return work.perform(stopped.call)
    except OSError as error:
        return str(error)


def system_call(thread: int) -> str:
    """Return the thread's system call: number, arguments, stack and code address. "" if it is in none or has ended."""
    with suppress(OSError):
        line = Path(f"/proc/{thread}/syscall").read_text().strip()
        return "" if line.startswith(("-1", "running")) else line
    return ""
