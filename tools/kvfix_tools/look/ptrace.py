"""Stop a thread of another process for a tenth of a millisecond to call C functions in the thread (x86-64, aarch64).

ptrace stops only this thread, and sends no signal to it. After a call, kvfix restores all registers, even the vector
registers, because the thread may be inside a computation. kvfix lets each C function return to a breakpoint instruction
in the process's code, where the thread stops. kvfix writes only a return address to memory, and only on x86-64.

If the tracing process died during a call, the breakpoint would end the traced process. So kvfix forks a tracing process
for each `stop`. The tracing process completes all calls of `stop` even if the user ends kvfix.
"""

import ctypes
import errno
import os
import platform
import re
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

_SECONDS = 20.0  # time limit of a `stop` with all its calls, in seconds
_POKEDATA, _CONT, _DETACH = 5, 7, 17
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A, 0x420B
_WALL = 0x40000000  # option of waitpid to wait for threads too
_REGISTERS, _FLOATING = 1, 2  # NT_PRSTATUS, and NT_PRFPREG for machines without wide vectors
_LARGEST = 32768
_BELOW = 128 + 128  # bytes to skip below the stack: the red zone of x86-64, and a margin of 128 bytes
#: Flags that must be clear at a function call: direction of string instructions (x86-64), branch type (aarch64).
_FLAGS = 0xC00
#: Signals at the end of a called function. SIGTRAP: the breakpoint was reached. All others: the function crashed.
_ENDS = {signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_libc = ctypes.CDLL(None, use_errno=True)
#: A function that runs in the tracing process. Its argument `call(address, ...)` calls a C function in the thread.
Work = Callable[[Callable[..., int]], int]
Registers: TypeAlias = "array[int]"


class Refused(Exception):
    """The call is not possible. setting: what the user can change, or "" if nothing helps."""

    def __init__(self, reason: str, setting: str = "") -> None:
        super().__init__(f"{reason}. {setting}" if setting else reason)
        self.reason = reason
        self.setting = setting


class Machine(NamedTuple):
    """Indexes of registers in NT_PRSTATUS (8 bytes each), and other properties of a processor architecture."""

    arguments: tuple[int, ...]
    answer: int
    place: int  # the program counter
    stack: int
    flags: int
    number: int  # register with the number of a system call
    called: tuple[int, ...]  # registers with the arguments of a system call
    forgets: bool  # True: -1 in the register `number` keeps the kernel from restarting an interrupted system call
    returns: int | None  # register with the return address; None if the return address is on the stack
    vectors: int  # the register set with all vector registers
    trap: re.Pattern[bytes]  # the breakpoint instruction
    multiple: int  # alignment of the breakpoint instruction in bytes
    back: int  # bytes by which the kernel may set the program counter back before it restarts a system call


_BRK = re.compile(rb"(?s)[\0 @`\x80\xa0\xc0\xe0].[ -?]\xd4")  # the instruction brk with any number
#: See `user_regs_struct` and NT_X86_XSTATE (x86-64), `user_pt_regs` and NT_ARM_SVE (aarch64) for the registers.
_MACHINES = {
    "x86_64": Machine(
        (14, 13, 12, 11, 9, 8), 10, 16, 19, 18, 15, (14, 13, 12, 7, 9, 8), True, None, 0x202, re.compile(b"\xcc"), 1, 0
    ),
    "aarch64": Machine(
        (0, 1, 2, 3, 4, 5, 6, 7), 0, 32, 31, 33, 8, (0, 1, 2, 3, 4, 5), False, 30, 0x405, _BRK, 4, 4
    ),
}  # fmt: skip
MACHINE = _MACHINES.get(platform.machine())  # None for other architectures


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@lru_cache(maxsize=1)
def _cores() -> threading.Semaphore:
    """Return the semaphore that allows one stopped thread per core, so that no tracing process waits for a core."""
    return threading.Semaphore(len(os.sched_getaffinity(0)))


def stop(thread: int, wait: str, trap: int, work: Work) -> int | None:
    """Stop a thread and run `work`. Return its result, or None if the thread is not in system call `wait` ("": any)."""
    with _cores():
        pipe, there = Pipe(duplex=False)
        tracer = os.fork()
        if tracer == 0:
            _trace(there, thread, wait, trap, work)
        there.close()
        try:
            if not pipe.poll(_SECONDS):
                reason = f"thread {thread} did not return from a call within {_SECONDS:g} s"
                raise Refused(reason, f"Do not end process {tracer}: it waits for the thread.")
            answer: int | str | None = pipe.recv()
        except (EOFError, OSError) as error:
            raise Refused(f"thread {thread} cannot be called: process {tracer} has ended") from error
        with suppress(ChildProcessError):  # waitpid raises if kvfix has inherited an ignored SIGCHLD
            os.waitpid(tracer, 0)
    if isinstance(answer, str):
        raise Refused(f"thread {thread} cannot be called: {answer}")
    return answer


def _trace(pipe: "Connection[int | str | None, None]", *work: Any) -> None:
    try:
        with suppress(PermissionError):  # real-time priority avoids a long wait for a busy core, but needs root
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for at in {int(name) for name in os.listdir("/proc/self/fd")} - {pipe.fileno()}:
            with suppress(OSError):  # `at` may be the closed descriptor of /proc/self/fd
                os.close(at)  # if `at` stayed open, a reader of kvfix's output would wait for this process
        pipe.send(_performed(*work))
    finally:
        os._exit(0)


def _performed(thread: int, wait: str, trap: int, work: Work) -> int | str | None:
    assert MACHINE is not None
    try:
        with _stopped(thread, MACHINE) as registers:
            if wait and not _is_in(MACHINE, registers, wait):
                return None
            return work(partial(_call, MACHINE, thread, trap, registers))
    except OSError as error:
        return str(error)


def _is_in(machine: Machine, registers: Registers, call: str) -> bool:
    """Return True if the thread waits in this system call. call: in the format of `man proc_pid_syscall`."""
    number, *arguments, stack, place = (int(word, 0) for word in call.split())
    found = [registers[at] for at in machine.called]
    return (
        [registers[machine.number], registers[machine.stack], *found[1:]] == [number, stack, *arguments[1:]]
        and found[0] in (arguments[0], 2**64 - errno.EINTR)
        and registers[machine.place] in (place, place - machine.back)
    )


def _call(machine: Machine, thread: int, trap: int, before: Registers, function: int, *arguments: int) -> int:
    """Call a C function. Return the lower 32 bits of the result. Raise OSError if the function crashes."""
    registers = before[:]
    for at, argument in zip(machine.arguments, arguments, strict=False):
        registers[at] = argument & 2**64 - 1
    stack = (registers[machine.stack] - _BELOW) & -16
    if machine.returns is None:
        stack -= 8
        _ptrace(_POKEDATA, thread, stack, trap)
    else:
        registers[machine.returns] = trap
    if machine.forgets:
        registers[machine.number] = 2**64 - 1  # so that the kernel does not restart the system call first
    registers[machine.stack], registers[machine.place] = stack, function
    registers[machine.flags] &= ~_FLAGS
    _set(thread, _REGISTERS, registers.tobytes())
    _ptrace(_CONT, thread)
    ended = _wait(thread, lambda number, event: not event and number in _ENDS)
    after = array("Q", _get(thread, _REGISTERS))
    if ended != signal.SIGTRAP or after[machine.place] - trap not in (0, 1):
        raise OSError(f"the function ended with signal {ended} at {after[machine.place]:#x}")
    return ctypes.c_int32(after[machine.answer] & 2**32 - 1).value


@contextmanager
def _stopped(thread: int, machine: Machine) -> Iterator[Registers]:
    """Stop the thread, yield its registers, and let it run afterwards. Raise OSError if ptrace fails."""
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        _wait(thread, lambda _, event: bool(event))
        registers, vectors, blocked = _get(thread, _REGISTERS), _vectors(thread, machine), ctypes.c_uint64()
        _ptrace(_GETSIGMASK, thread, 8, ctypes.addressof(blocked))
        # If SIGTRAP stayed blocked, the breakpoint would make the kernel unblock SIGTRAP permanently.
        _block(thread, blocked.value & ~(1 << signal.SIGTRAP - 1))
        try:
            yield array("Q", registers)
        finally:
            _block(thread, blocked.value)
            _set(thread, *vectors)
            _set(thread, _REGISTERS, registers)
    finally:
        with suppress(ProcessLookupError):
            _ptrace(_DETACH, thread)


def _vectors(thread: int, machine: Machine) -> tuple[int, bytes]:
    for kind in (machine.vectors, _FLOATING):
        with suppress(OSError):
            return kind, _get(thread, kind)
    raise OSError("the vector registers of the thread cannot be read")


def _wait(thread: int, wanted: Callable[[int, int], bool]) -> int:
    """Wait until the thread stops with a wanted signal and event. Pass on all other signals. Return the signal."""
    while True:
        _, status = os.waitpid(thread, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError("the thread has ended")
        number, event = os.WSTOPSIG(status), status >> 16
        if wanted(number, event):
            return number
        _ptrace(_CONT, thread, 0, 0 if event else number)


def _block(thread: int, signals: int) -> None:
    mask = ctypes.c_uint64(signals)
    _ptrace(_SETSIGMASK, thread, 8, ctypes.addressof(mask))


def _get(thread: int, kind: int) -> bytes:
    content = ctypes.create_string_buffer(_LARGEST)
    vector = _Vector(ctypes.addressof(content), _LARGEST)
    _ptrace(_GETREGSET, thread, kind, ctypes.addressof(vector))
    return content.raw[: vector.length]


def _set(thread: int, kind: int, content: bytes) -> None:
    held = ctypes.create_string_buffer(content, len(content))
    vector = _Vector(ctypes.addressof(held), len(content))
    _ptrace(_SETREGSET, thread, kind, ctypes.addressof(vector))


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    words = [ctypes.c_long(each) for each in (request, thread, address, data)]
    if _libc.ptrace(*words) == -1 and (error := ctypes.get_errno()):
        raise OSError(error, os.strerror(error))
