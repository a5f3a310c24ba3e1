"""Read limits of the machine or the container: memory, shared memory, locked memory, ports. All sizes are in bytes."""

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB = 2**30


class Machine:
    """The limits of a machine. root: the folder with proc, sys and dev, which is / except in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def memory(self) -> tuple[int | None, int | None, str]:
        """Return (memory limit of all processes together, available memory, source of the limit). None: unknown."""
        lines = (line.split() for line in self._text("proc/meminfo").splitlines())
        values = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
        total, available = values.get("MemTotal:"), values.get("MemAvailable:")
        limit, file = min(self._cgroup_limits(), default=(None, ""))
        if limit is not None and (total is None or limit < total):
            return limit, min(limit, available) if available is not None else None, f"the container ({file})"
        return total, available, "this machine"

    def shared_memory(self) -> tuple[int, int] | None:
        """Return (size, free) of /dev/shm; None if /dev/shm does not exist."""
        with suppress(OSError):
            found = os.statvfs(self._root / "dev/shm")
            return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return None

    def locked_memory(self) -> int | None:
        """Return the limit of `ulimit -l`; None if it is unlimited."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def processor_flags(self) -> set[str]:
        """Return the flags of an x86 processor as Linux names them (avx2, avx512f); empty for other processors."""
        flags = (line.partition(":")[2] for line in self._text("proc/cpuinfo").splitlines() if line.startswith("flags"))
        return set(next(flags, "").split())

    def is_wsl(self) -> bool:
        """Return True in the Windows Subsystem for Linux, where the driver can pin only little memory."""
        return "microsoft" in self._text("proc/version").lower()

    def has_nvidia(self) -> bool:
        return (self._root / "dev/nvidiactl").exists() or (self._root / "dev/dxg").exists()

    def _cgroup_limits(self) -> Iterator[tuple[int, str]]:
        """Yield (memory limit, name of its file) for this process's cgroup and its parents up to /sys/fs/cgroup."""
        for line in self._text("proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                top, file = "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                top, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            here = Path(path.strip("/"))
            for group in {here, *here.parents, Path()}:
                text = self._text(f"{top}/{group}/{file}").strip()
                if text.isdigit() and int(text) < 2**60:  # without a limit, cgroup v1 writes nearly 2**63
                    yield int(text), file

    def _text(self, path: str) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return (self._root / path).read_text()
        return ""


def port_in_use(host: str, port: int) -> bool:
    """Return True if another server listens on this port. Return False if the host is another machine."""
    try:
        with socket.create_server((host, port)):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def resolves(host: str) -> bool:
    with suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def connects(host: str, port: int) -> str:
    """Open a TCP connection. Return the error; "" if the connection opens."""
    try:
        with socket.create_connection((host, port), 3.0):
            return ""
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)


def redis_refuses(host: str, port: int) -> str:
    """Return the error that Redis sends for PING. Return READONLY for a read-only replica, and "" otherwise."""
    try:
        with socket.create_connection((host, port), 1.0) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(512)
            if answer.startswith(b"-"):
                return answer[1:].split(b"\r\n")[0].decode(errors="replace")
            connection.sendall(b"INFO replication\r\n")
            role = connection.recv(4096)
    except OSError:
        return ""
    return "READONLY: the server is a replica" if b"role:slave" in role and b"slave_read_only:0" not in role else ""


def gib(size: float) -> str:
    return f"{size / GIB:.4g} GiB" if size >= GIB / 10 else f"{size / 2**20:.4g} MiB"
