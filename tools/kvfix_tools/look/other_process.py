"""Access another Python process: its memory, its files, and its functions."""

import os
import platform
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvfix_tools.look import ptrace, shared_folder
from kvfix_tools.look.ptrace import Refused
from kvfix_tools.look.shared_folder import SharedFolder

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
OTHER_NAMESPACE = (
    "If the process is in a container, run kvfix in its process namespace: kubectl debug --target, or docker run "
    "--pid=container:NAME."
)
_CALLED = re.compile(r"(lib)?python\d|libc[.-]|ld-musl")  # names of the files whose functions kvfix calls
#: Key of a breakpoint instruction in the result of `_exported`.
TRAP = "breakpoint instruction"
#: A cache {pid: process}. CUDA adds thousands of mappings to a process, so kvfix reads the mappings only once.
_PROCESSES: dict[int, "Process"] = {}
#: A cache {(device, inode, time) of a file: result of `_exported`}. The processes of an engine map the same files.
_SYMBOLS: dict[tuple[int, int, int], dict[str, tuple[int, int]]] = {}


class Process:
    """Another process. The constructor raises Refused if kvfix may not trace the process."""

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
        self._mapped = _mapped_files(self._proc)
        self._found: dict[str, tuple[int, int]] = {}

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._memory)

    def is_alive(self) -> bool:
        """Return False if no file of `_mapped` is mapped any more: the process has ended or runs another program."""
        return any(map(self.has_mapped, self._mapped.values()))

    def python(self) -> str:
        """Return the process's Python release, such as "3.11", or "" if no name of a mapped file shows the release."""
        found = (re.search(r"python(3\.\d+)", path.rpartition("/")[2]) for path in self._mapped)
        return next((each[1] for each in found if each), "")

    def has_mapped(self, address: int) -> bool:
        with suppress(OSError):
            return len(self.read(address, 1)) == 1
        return False

    def read(self, address: int, size: int) -> bytes:
        return os.pread(self._memory, size, address)

    def write(self, address: int, content: bytes) -> None:
        os.pwrite(self._memory, content, address)

    def folder(self, path: str) -> SharedFolder:
        """Open a folder in the process's file system, even in another container. Raise OSError if `path` has a link."""
        return SharedFolder(self._opened(path, os.O_PATH | os.O_DIRECTORY), self.user)

    def _opened(self, path: str, flags: int) -> int:
        return shared_folder.opened(os.open(self._proc / "root", os.O_PATH | os.O_DIRECTORY), path, flags)

    def address(self, name: str) -> int:
        """Return the address of a function of Python or the C library, or of a breakpoint instruction (TRAP)."""
        return self._symbol(name)[0]

    def _symbol(self, name: str) -> tuple[int, int]:
        if name not in self._found:
            for path, start in self._mapped.items():
                if found := _symbols(self._opened(path, os.O_RDONLY | os.O_NONBLOCK)).get(name):
                    self._found[name] = start + found[0], found[1]
                    break
            else:
                raise Refused(f"process {self.pid} is not a Python that kvfix can call: it has no {name}", "")
        return self._found[name]

    def call(self, name: str, *arguments: int) -> None:
        """Call a C function in the main thread. The function must neither wait nor allocate memory."""
        address = self.address(name)
        ptrace.stop(self.pid, "", self._trap(), lambda call: call(address, *arguments))

    def run_waiting(self, line: int) -> bool:
        """Run a line of Python in the main thread if the thread waits without the GIL. Return True if the line ran.

        A thread in a long wait without the GIL holds no lock of malloc or Python, so the thread can take the GIL.
        Once the wait is over, a call by kvfix could hang, because the thread may hold the GIL's mutex (see `wait`).
        """
        names = "PyGILState_Check", "PyGILState_Ensure", "PyRun_SimpleString", "PyGILState_Release"
        check, ensure, run, release = map(self.address, names)

        def work(call: Callable[..., int]) -> int:
            if call(check):
                return 0
            state = call(ensure)
            call(run, line)
            call(release, state)
            return 1

        wait = self.wait()
        return bool(wait and ptrace.stop(self.pid, wait, self._trap(), work))

    def _trap(self) -> int:
        """Return the address of a breakpoint instruction. Raise Refused if kvfix cannot use the instruction."""
        if ptrace.MACHINE is None:
            reason = f"kvfix cannot call into a process on {platform.machine()}"
            raise Refused(reason, "Use Python 3.14 or later for the engine and for kvfix.")
        address = self.address(TRAP)
        if not ptrace.MACHINE.trap.match(self.read(address, ptrace.MACHINE.multiple)):
            raise Refused(f"the code of process {self.pid} differs from the files that it has mapped", "")
        return address

    def wait(self) -> str:
        """Return the system call in which the main thread waits (number, arguments, stack, code address), or "".

        Also return "" if the thread waits for a lock of the Python runtime. A thread that takes the GIL may hold the
        GIL's mutex and wait for a second mutex (`take_gil`, ceval_gil.h). A call into this thread would then hang.
        """
        before = self._state()
        time.sleep(0.03)
        state, _, call = before
        if self._state() != before or state != "S" or not call:
            return ""
        runtime, size = self._symbol("_PyRuntime")
        return "" if int(call.split()[1], 16) in range(runtime, runtime + size) else call

    def _state(self) -> tuple[str, str, str]:
        """Return the main thread's state, its number of waits so far, and its system call or ""."""
        status, call = self.status(), ""
        with suppress(OSError):
            call = (self._proc / "syscall").read_text().strip()
        return status["State"][0], status["voluntary_ctxt_switches"], "" if call.startswith(("-1", "running")) else call

    def status(self) -> dict[str, str]:
        lines = (self._proc / "status").read_text(errors="replace").splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def process(pid: int) -> Process:
    """Return the process with this id. Raise Refused if another program traces it, or if kvfix may not trace it."""
    for each, known in list(_PROCESSES.items()):
        if not known.is_alive():
            _PROCESSES.pop(each, None)
    found = _PROCESSES.get(pid) or _PROCESSES.setdefault(pid, Process(pid))
    tracer = found.status()["TracerPid"]
    if tracer != "0":
        raise Refused(f"process {pid} is traced by process {tracer}", f"End process {tracer} first.")
    return found


def _mapped_files(process: Path) -> dict[str, int]:
    """Return {path: address of its first mapping} for the files of Python and the C library in a process."""
    found: dict[str, int] = {}
    for line in (process / "maps").read_text(errors="replace").splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith("/") and _CALLED.match(path.rpartition("/")[2]):
            found.setdefault(path, int(addresses.partition("-")[0], 16))
    return found


def _symbols(handle: int) -> dict[str, tuple[int, int]]:
    """Return the exported functions of an open file, and close the file."""
    about = os.fstat(handle)
    key = about.st_dev, about.st_ino, about.st_mtime_ns
    if key in _SYMBOLS:
        os.close(handle)
    else:
        _SYMBOLS[key] = _exported(shared_folder.content(handle))
    return _SYMBOLS[key]


def _exported(content: bytes) -> dict[str, tuple[int, int]]:
    """Return {name: (offset from the start of the mapping, size)} for TRAP and each exported name of an ELF file."""
    if content[:5] != b"\x7fELF\x02":
        return {}
    programs, sections = struct.unpack_from("<QQ", content, 32)
    program_size, program_count, size, count = struct.unpack_from("<HHHH", content, 54)
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


def _missing_right(user: int) -> str:
    """Return what to change, so that kvfix may trace a process that belongs to the user `user`."""
    if os.geteuid() not in (0, user):
        return f"Run kvfix as the user of the process (id {user}), or as root."
    if _YAMA.exists() and _YAMA.read_text().strip() != "0":
        return "Run sysctl kernel.yama.ptrace_scope=0, or run kvfix as root; in a container add --cap-add SYS_PTRACE."
    return "Start the container with --cap-add SYS_PTRACE (securityContext.capabilities.add: [SYS_PTRACE])."
