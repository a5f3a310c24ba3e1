"""C functions called in a thread of another process, which is stopped for that: ptrace on Linux, x86-64 and aarch64.

The thread stops alone and without a signal. It gets all its registers back, those for vectors too: it may be in the
middle of a kernel. Nothing else of it is written but a return address below its stack: that of a breakpoint instruction
which the process has in its code anyway. There the thread stops again.

Who has stopped a thread has to stay: without it, the thread runs into the breakpoint, and the process ends. So `calls`
has it done by a process of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

_POKEDATA, _CONT, _DETACH = 5, 7, 17
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A, 0x420B
#: Option of waitpid: for threads too.
_WALL = 0x40000000
#: NT_PRSTATUS. NT_PRFPREG: on x86-64 and aarch64 without wide vectors.
_REGISTERS, _FLOATING = 1, 2
_LARGEST = 32768
#: What the x86-64 ABI lets a function use below its stack, and room: bytes.
_BELOW = 128 + 128
#: The direction of string instructions (x86-64), and what a jump may land on (aarch64): a function wants them clear.
_FLAGS = 0xC00
#: The function has come to the breakpoint, or has gone wrong.
_ENDS = {signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class Machine(NamedTuple):
    """Places of registers among those of NT_PRSTATUS, of 8 bytes each, and what else differs.

    number: of a system call, with its own arguments (called). forgets: whether that is -1 for none. returns: where to,
    None if that is on the stack. vectors: the set of all of them. trap: the breakpoint instruction, at a multiple of so
    many bytes. back: bytes by which a thread that is stopped in a system call stands before where it returns to.
    """

    arguments: tuple[int, ...]
    answer: int
    place: int
    stack: int
    flags: int
    number: int
    called: tuple[int, ...]
    forgets: bool
    returns: int | None
    vectors: int
    trap: re.Pattern[bytes]
    multiple: int
    back: int


#: brk, with any number.
_BRK = re.compile(rb"(?s)[\0 @`\x80\xa0\xc0\xe0].[ -?]\xd4")
#: `user_regs_struct` and NT_X86_XSTATE; `user_pt_regs` and NT_ARM_SVE.
_MACHINES = {
    "x86_64": Machine(
        (14, 13, 12, 11, 9, 8), 10, 16, 19, 18, 15, (14, 13, 12, 7, 9, 8), True, None, 0x202, re.compile(b"\xcc"), 1, 0
    ),
    "aarch64": Machine(
        (0, 1, 2, 3, 4, 5, 6, 7), 0, 32, 31, 33, 8, (0, 1, 2, 3, 4, 5), False, 30, 0x405, _BRK, 4, 4
    ),
}  # fmt: skip
#: None: threads are called by gdb.
MACHINE = _MACHINES.get(platform.machine())


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)


class Stopped:
    """A thread that is. trap: address of a breakpoint instruction in its process."""

    def __init__(self, thread: int, trap: int, machine: Machine) -> None:
        self._thread, self._trap, self._machine = thread, trap, machine
        self.registers = _get(thread, _REGISTERS)

    def is_in(self, call: str) -> bool:
        """Whether it waits in this system call: number, arguments, stack and place (`man proc_pid_syscall`).

        What it is stopped in begins again, or has returned EINTR.
        """
        machine, registers = self._machine, self._unpacked(self.registers)
        number, *arguments, stack, place = (int(word, 0) for word in call.split())
        found = [registers[at] for at in machine.called]
        return (
            [registers[machine.number], registers[machine.stack], *found[1:]] == [number, stack, *arguments[1:]]
            and found[0] in (arguments[0], 2**64 - errno.EINTR)
            and registers[machine.place] in (place, place - machine.back)
        )

    def call(self, function: int, *arguments: int) -> int:
        """The lower 32 bits of what it answers. Raises OSError."""
        machine, registers = self._machine, self._unpacked(self.registers)
        for at, argument in zip(machine.arguments, arguments, strict=False):
            registers[at] = argument & 2**64 - 1
        stack = (registers[machine.stack] - _BELOW) & -16
        if machine.returns is None:
            stack -= 8
            _ptrace(_POKEDATA, self._thread, stack, self._trap)
        else:
            registers[machine.returns] = self._trap
        if machine.forgets:
            registers[machine.number] = 2**64 - 1  # nothing begins again before the function does
        registers[machine.stack], registers[machine.place] = stack, function
        registers[machine.flags] &= ~_FLAGS
        _set(self._thread, _REGISTERS, struct.pack(f"<{len(registers)}Q", *registers))
        _ptrace(_CONT, self._thread)
        ended = _wait(self._thread, lambda number, event: not event and number in _ENDS)
        after = self._unpacked(_get(self._thread, _REGISTERS))
        if ended != signal.SIGTRAP or after[machine.place] - self._trap not in (0, 1):
            raise OSError(f"the function ended with signal {ended} at {after[machine.place]:#x}")
        return ctypes.c_int32(after[machine.answer] & 2**32 - 1).value

    @staticmethod
    def _unpacked(registers: bytes) -> list[int]:
        return list(struct.unpack(f"<{len(registers) // 8}Q", registers))


@contextmanager
def stopped(thread: int, trap: int) -> Iterator[Stopped]:
    """Stop it, and let it go on. Raises OSError."""
    machine = MACHINE
    assert machine is not None
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        _wait(thread, lambda _, event: bool(event))
        found = Stopped(thread, trap, machine)
        vectors, blocked = _vectors(thread, machine), ctypes.c_uint64()
        _ptrace(_GETSIGMASK, thread, 8, ctypes.addressof(blocked))
        # A breakpoint while SIGTRAP is blocked would unblock it for good.
        _block(thread, blocked.value & ~(1 << signal.SIGTRAP - 1))
        try:
            yield found
        finally:
            _block(thread, blocked.value)
            _set(thread, *vectors)
            _set(thread, _REGISTERS, found.registers)
    finally:
        with suppress(ProcessLookupError):
            _ptrace(_DETACH, thread)


def _vectors(thread: int, machine: Machine) -> tuple[int, bytes]:
    for kind in (machine.vectors, _FLOATING):
        with suppress(OSError):
            return kind, _get(thread, kind)
    raise OSError("its vector registers cannot be read")


def _wait(thread: int, wanted: Callable[[int, int], bool]) -> int:
    """Until it stops with this signal and event; the signal. It gets all other signals."""
    while True:
        _, status = os.waitpid(thread, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError("it has ended")
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
