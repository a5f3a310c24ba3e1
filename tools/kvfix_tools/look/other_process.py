"""Another Python process: its memory, its files, the addresses of its functions."""

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path

from kvfix_tools.look import calls, ptrace, shared_folder
from kvfix_tools.look.calls import Refused

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
OTHER_NAMESPACE = "In a container its number is another one: kubectl debug --target, docker run --pid=container:NAME."
#: Names of the files whose functions are called.
_CALLED = re.compile(r"(lib)?python\d|libc[.-]|ld-musl")
#: Among the names of functions: a breakpoint instruction.
TRAP = "breakpoint instruction"


class Process:
    """A process that may be traced. Raises Refused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._proc = Path(f"/proc/{pid}")
        try:
            self.user = self._proc.stat().st_uid
            self._memory = os.open(self._proc / "mem", os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError):
            raise Refused(f"there is no process {pid}", OTHER_NAMESPACE) from None
        except PermissionError:
            raise Refused(f"process {pid} may not be traced", _missing_right(self.user)) from None
        self._program = self._about()[1]
        self._mapped = _mapped_files(self._proc)
        self._found: dict[str, tuple[int, int]] = {}

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._memory)

    def is_alive(self) -> bool:
        with suppress(OSError):
            state, program = self._about()
            return program == self._program and state not in "ZX"
        return False

    def refuse_if_traced(self) -> None:
        tracer = self._status()["TracerPid"]
        if tracer != "0":
            raise Refused(f"process {self.pid} is traced by process {tracer}", "End that debugger, strace or py-spy.")

    def python(self) -> str:
        """ "3.11": its release, as the name of its library or program has it. "" if that has none."""
        return next(
            (found[1] for path in self._mapped if (found := re.search(r"python(3\.\d+)", path.rpartition("/")[2]))), ""
        )

    # ------------------------------------------------------------------ memory and files

    def has_mapped(self, address: int) -> bool:
        with suppress(OSError):
            return len(self.read(address, 1)) == 1
        return False

    def read(self, address: int, size: int) -> bytes:
        return os.pread(self._memory, size, address)

    def write(self, address: int, content: bytes) -> None:
        os.pwrite(self._memory, content, address)

    def folder(self, path: str) -> int:
        """Descriptor of a folder of the process, which may be in another container. Raises OSError, also for a link."""
        return self._opened(path, os.O_PATH | os.O_DIRECTORY)

    def _opened(self, path: str, flags: int) -> int:
        return shared_folder.opened(os.open(self._proc / "root", os.O_PATH | os.O_DIRECTORY), path, flags)

    # ------------------------------------------------------------------ calls

    def address(self, name: str) -> int:
        """Address of a function of Python or of the C library, or of a breakpoint instruction (TRAP)."""
        return self._symbol(name)[0]

    def _symbol(self, name: str) -> tuple[int, int]:
        """Its address and size."""
        if name not in self._found:
            for path, start in self._mapped.items():
                found = _symbols(self._opened(path, os.O_RDONLY | os.O_NONBLOCK)).get(name)
                if found is not None:
                    self._found[name] = start + found[0], found[1]
                    break
            else:
                raise Refused(f"process {self.pid} is no Python that can be called: it has no {name}", "")
        return self._found[name]

    def call(self, name: str, *arguments: int) -> None:
        """Call a C function in the main thread. It must neither wait nor take memory."""
        calls.stop(calls.Thread(self.pid, "", self._trap()), calls.Call(self.address(name), arguments))

    def run_waiting(self, line: int) -> bool:
        """Have the main thread run this line of Python if it waits in a system call without the GIL; whether it did."""
        check, ensure, release = (self.address(f"PyGILState_{name}") for name in ("Check", "Ensure", "Release"))
        work = calls.RunWaiting(check, ensure, self.address("PyRun_SimpleString"), release, line)
        wait = self.wait()
        return bool(wait and calls.stop(calls.Thread(self.pid, wait, self._trap()), work))

    def _trap(self) -> int:
        """Address of a breakpoint instruction. Raises Refused."""
        if ptrace.MACHINE is None:
            return 0
        address = self.address(TRAP)
        if not ptrace.MACHINE.trap.match(self.read(address, ptrace.MACHINE.multiple)):
            raise Refused(f"process {self.pid} does not run the files that it has mapped", "")
        return address

    def wait(self) -> str:
        """The system call in which the main thread is all the time: its number, arguments, stack and place; or "".

        Not in one on a lock of Python's own, such as the mutex of the GIL. Whoever takes the GIL holds that while it
        waits for a second one (`take_gil`, ceval_gil.h), on a busy machine for long: called then, it waits for itself.
        """
        state, switches, first = self._state()
        time.sleep(0.03)
        if self._state() != (state, switches, first) or state != "S" or not first:
            return ""
        runtime, size = self._symbol("_PyRuntime")
        return "" if int(first.split()[1], 16) in range(runtime, runtime + size) else first

    def _state(self) -> tuple[str, str, str]:
        """Of the main thread: state, how often it has waited, system call."""
        status = self._status()
        return status["State"][0], status["voluntary_ctxt_switches"], calls.system_call(self.pid)

    def _status(self) -> dict[str, str]:
        lines = (self._proc / "status").read_text(errors="replace").splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def _about(self) -> tuple[str, list[str]]:
        """Its state, and what changes when it starts another program: its start, where its code and its stack are."""
        fields = (
            (self._proc / "stat").read_text(errors="replace").rpartition(")")[2].split()
        )  # man proc_pid_stat, from 3
        return fields[0], [fields[19], *fields[23:26]]


#: Read once for all looks: a process with CUDA has thousands of mappings.
_PROCESSES: dict[int, Process] = {}


def process(pid: int) -> Process:
    """A process that nothing else traces. Raises Refused."""
    found = _PROCESSES.get(pid)
    if found is None or not found.is_alive():
        for each in [each for each, known in list(_PROCESSES.items()) if not known.is_alive()]:
            _PROCESSES.pop(each, None)
        found = _PROCESSES[pid] = Process(pid)
    found.refuse_if_traced()
    return found


def _mapped_files(process: Path) -> dict[str, int]:
    """{path: address} of Python and the C library, as a process has them mapped from their start."""
    found: dict[str, int] = {}
    for line in (process / "maps").read_text(errors="replace").splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith("/") and _CALLED.match(path.rpartition("/")[2]):
            found.setdefault(path, int(addresses.partition("-")[0], 16))
    return found


#: What `_exported` has found, by the device, inode and time of the file: the processes of an engine share theirs.
_SYMBOLS: dict[tuple[int, int, int], dict[str, tuple[int, int]]] = {}


def _symbols(handle: int) -> dict[str, tuple[int, int]]:
    """Of an open file, which is closed."""
    about = os.fstat(handle)
    key = about.st_dev, about.st_ino, about.st_mtime_ns
    if key in _SYMBOLS:
        os.close(handle)
    else:
        _SYMBOLS[key] = _exported(shared_folder.content(handle))
    return _SYMBOLS[key]


def _exported(content: bytes) -> dict[str, tuple[int, int]]:
    """{what the ELF file exports: its offset to the start of the file's mapping, and its size}, and TRAP"""
    if content[:5] != b"\x7fELF\x02":
        return {}
    programs, sections, program_size, program_count, size, count = _header(content)
    headers = [struct.unpack_from("<IIQQQQ", content, programs + at * program_size) for at in range(program_count)]
    base = min(address for type_, _, _, address, _, _ in headers if type_ == 1) & -4096
    tables = [struct.unpack_from("<IIQQQQIIQQ", content, sections + at * size) for at in range(count)]
    found = {}
    for type_, flags, offset, address, _, length in headers:
        if type_ == 1 and flags & 1 and ptrace.MACHINE is not None:
            for trap in ptrace.MACHINE.trap.finditer(content, offset, offset + length):
                if (trap.start() - offset + address) % ptrace.MACHINE.multiple == 0:
                    found[TRAP] = trap.start() - offset + address - base, ptrace.MACHINE.multiple
                    break
    for table in tables:
        if table[1] == 11:  # SHT_DYNSYM
            names = tables[table[6]][4]
            entries = struct.iter_unpack("<IBBHQQ", content[table[4] : table[4] + table[5]])
            for name, _, _, section, value, length in entries:
                if section and value:
                    end = content.index(b"\0", names + name)
                    found[content[names + name : end].decode()] = value - base, length
    return found


def _header(content: bytes) -> tuple[int, int, int, int, int, int]:
    programs, sections = struct.unpack_from("<QQ", content, 32)
    program_size, program_count, size, count = struct.unpack_from("<HHHH", content, 54)
    return programs, sections, program_size, program_count, size, count


def _missing_right(user: int) -> str:
    """The setting because of which a process of this user may not be traced."""
    if os.geteuid() not in (0, user):
        return f"Run kvfix as its user (id {user}), or as root."
    if _YAMA.exists() and _YAMA.read_text().strip() != "0":
        return "sysctl kernel.yama.ptrace_scope=0, or run kvfix as root, in a container with --cap-add SYS_PTRACE."
    return "Start the container with --cap-add SYS_PTRACE (securityContext.capabilities.add: [SYS_PTRACE])."
