"""Another Python process: its memory, its files, the addresses of its functions."""

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from kvfix_tools.look import calls
from kvfix_tools.look.calls import Refused

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
#: Names of the files whose functions are called.
_CALLED = re.compile(r"(lib)?python\d|libc[.-]|ld-musl")


class Process:
    """A process that may be traced. Raises Refused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._proc = Path(f"/proc/{pid}")
        try:
            self.user = self._proc.stat().st_uid
            self._memory = os.open(self._proc / "mem", os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError):
            raise Refused(f"there is no process {pid}", _other_namespace()) from None
        except PermissionError:
            raise Refused(f"process {pid} may not be traced", _missing_right(self.user)) from None
        tracer = self._status("TracerPid")
        if tracer != "0":
            raise Refused(f"process {pid} is traced by process {tracer}", "End that debugger, strace or py-spy.")
        self._began = self._start()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._memory)

    def is_alive(self) -> bool:
        with suppress(OSError):
            return self._start() == self._began and self._status("State")[0] not in "ZX"
        return False

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

    def seen_from_here(self, path: str) -> Path | None:
        """A folder of the process, by a path without links; None if it has none. It may be in another container."""
        here = self._proc / "root"
        for part in path.split("/")[1:]:
            here /= part
            if here.is_symlink():
                return None
        return here if path.startswith("/") and here.is_dir() else None

    def own_text(self, path: Path) -> str:
        """Raises FileNotFoundError. The file is the process's, and no link: who reads may be root."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", errors="replace") as file:
            if os.fstat(file.fileno()).st_uid != self.user:
                raise Refused(f"{path} is not of the user of process {self.pid}", "")
            return file.read()

    # ------------------------------------------------------------------ calls

    def address(self, name: str) -> int:
        """Address of a function of Python or of the C library."""
        for path, start in self._mapped.items():
            offset = _symbols(self._proc / "root" / path.lstrip("/")).get(name)
            if offset is not None:
                return start + offset
        raise Refused(f"process {self.pid} is no Python that can be called: it exports no {name}", "")

    def call(self, name: str, *arguments: int) -> int:
        """Call a C function in the main thread. It must neither wait nor take memory. The answer is 32 bits of it."""
        return calls.stop(self.pid, calls.Call(self.address(name), arguments))

    def run_waiting(self, line: int) -> bool:
        """Have the main thread run this line of Python if it waits in a system call without the GIL; whether it did."""
        check, ensure, release = (self.address(f"PyGILState_{name}") for name in ("Check", "Ensure", "Release"))
        run = self.address("PyRun_SimpleString")
        wait = self.wait()
        return bool(wait and calls.stop(self.pid, calls.RunWaiting(self.pid, wait, check, ensure, run, release, line)))

    def wait(self) -> str:
        """The system call in which the main thread is all the time: its number, arguments, stack and place; or ""."""
        first = self._status("State")[0], self._status("voluntary_ctxt_switches"), calls.system_call(self.pid)
        time.sleep(0.03)
        same = first == (self._status("State")[0], self._status("voluntary_ctxt_switches"), calls.system_call(self.pid))
        return first[2] if same and first[0] == "S" else ""

    @property
    def _mapped(self) -> dict[str, int]:
        return _mapped_files(self.pid, *self._about()[19:28])

    def _status(self, key: str) -> str:
        for line in (self._proc / "status").read_text(errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return line.partition(":")[2].strip()
        return ""

    def _start(self) -> str:
        return self._about()[19]

    def _about(self) -> list[str]:
        """From the state on (`man proc_pid_stat`, field 3)."""
        return (self._proc / "stat").read_text(errors="replace").rpartition(")")[2].split()


@lru_cache(maxsize=64)
def _mapped_files(pid: int, *_program: str) -> dict[str, int]:
    """{path: address} of Python and the C library, as a process has them mapped from their start.

    A process with CUDA has thousands of mappings: they are read once for all looks. _program: what changes when the
    process starts another one: its start, and where its code and its stack are.
    """
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith("/") and _CALLED.match(path.rpartition("/")[2]):
            found.setdefault(path, int(addresses.partition("-")[0], 16))
    return found


#: What `_exported` has found, by the device, inode and time of the file: the processes of an engine share theirs.
_SYMBOLS: dict[tuple[int, int, int], dict[str, int]] = {}


def _symbols(file: Path) -> dict[str, int]:
    about = file.stat()
    key = about.st_dev, about.st_ino, about.st_mtime_ns
    if key not in _SYMBOLS:
        _SYMBOLS[key] = _exported(file.read_bytes())
    return _SYMBOLS[key]


def _exported(content: bytes) -> dict[str, int]:
    """{function that the ELF file exports: its offset to the start of the file's mapping}"""
    if content[:5] != b"\x7fELF\x02":
        return {}
    programs, sections, program_size, program_count, size, count = _header(content)
    headers = [struct.unpack_from("<IIQQQQ", content, programs + at * program_size) for at in range(program_count)]
    base = min(address for type_, _, _, address, _, _ in headers if type_ == 1) & -4096
    tables = [struct.unpack_from("<IIQQQQIIQQ", content, sections + at * size) for at in range(count)]
    found = {}
    for table in tables:
        if table[1] == 11:  # SHT_DYNSYM
            names = tables[table[6]][4]
            entries = struct.iter_unpack("<IBBHQQ", content[table[4] : table[4] + table[5]])
            for name, _, _, section, value, _ in entries:
                if section and value:
                    end = content.index(b"\0", names + name)
                    found[content[names + name : end].decode()] = value - base
    return found


def _header(content: bytes) -> tuple[int, int, int, int, int, int]:
    programs, sections = struct.unpack_from("<QQ", content, 32)
    program_size, program_count, size, count = struct.unpack_from("<HHHH", content, 54)
    return programs, sections, program_size, program_count, size, count


def _other_namespace() -> str:
    return "In a container its number is another one: kubectl debug --target, docker run --pid=container:NAME."


def _missing_right(user: int) -> str:
    """The setting because of which a process of this user may not be traced."""
    if os.geteuid() not in (0, user):
        return f"Run kvfix as its user (id {user}), or as root."
    if _YAMA.exists() and _YAMA.read_text().strip() != "0":
        return "sysctl kernel.yama.ptrace_scope=0, or run kvfix as root, in a container with --cap-add SYS_PTRACE."
    return "Start the container with --cap-add SYS_PTRACE (securityContext.capabilities.add: [SYS_PTRACE])."
