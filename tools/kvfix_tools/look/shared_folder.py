"""A folder in which kvfix and the process that it reads exchange files.

kvfix may be root, and the user of the process may rename the folder or replace it by a link at any time. So kvfix opens
each folder of the path once, without following a link. It creates, reads and removes each file through the descriptor
of the folder.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def opened(root: int, path: str, flags: int) -> int:
    """Open the file at this path below the folder `root` without following a link. Close `root`. Raise OSError."""
    *folders, name = path.strip("/").split("/")
    at = root
    for part, how in [*((each, os.O_PATH | os.O_DIRECTORY) for each in folders), (name, flags)]:
        try:
            inner = os.open(part, how | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def content(handle: int) -> bytes:
    """Read an open file, and close it. Raise OSError for a pipe or a device, which might never end."""
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a regular file")
        return file.read()


class SharedFolder:
    """A folder for files of kvfix and a process. Raise OSError if it cannot be opened.

    parent: descriptor of its parent folder, which this object closes. inside: its path in the process. user: user of
    the process.
    """

    def __init__(self, parent: int, inside: str, user: int) -> None:
        self.inside = inside
        self._parent, self._name, self._user = parent, inside.rpartition("/")[2], user
        self._here = os.open(self._name, _FOLDER, dir_fd=parent)

    def __del__(self) -> None:
        for descriptor in (self._parent, vars(self).get("_here")):
            if descriptor is not None:
                os.close(descriptor)

    @classmethod
    def make(cls, parent: int, inside: str, user: int) -> SharedFolder:
        """Make the folder, and give it to this user. Raise OSError, also if somebody has replaced the folder."""
        try:
            os.mkdir(inside.rpartition("/")[2], 0o700, dir_fd=parent)
        except OSError:
            os.close(parent)
            raise
        made = cls(parent, inside, user)
        found = os.fstat(made._here)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700 or os.listdir(made._here):
            raise PermissionError(f"{inside} is not the folder that was made")
        os.fchown(made._here, user, -1)
        return made

    def is_of_user(self) -> bool:
        return os.fstat(self._here).st_uid == self._user

    def is_there(self) -> bool:
        """Return True if the folder still exists. The process removes the folder after a call that timed out."""
        with suppress(OSError):
            return os.path.samestat(
                os.stat(self._name, dir_fd=self._parent, follow_symlinks=False), os.fstat(self._here)
            )
        return False

    def has(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(os.stat(name, dir_fd=self._here, follow_symlinks=False))
        return False

    def write(self, name: str, text: str) -> None:
        """Write a file that belongs to the user of the process. An existing file is replaced."""
        part = f"{name}.{os.getpid()}-{time.monotonic_ns()}.new"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._here)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchown(handle, self._user, -1)
        os.replace(part, name, src_dir_fd=self._here, dst_dir_fd=self._here)

    def read(self, name: str) -> str:
        """Return the text of a file of the user. Raise OSError."""
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._here)
        if os.fstat(handle).st_uid != self._user:
            os.close(handle)
            raise PermissionError(f"{self.inside}/{name} does not belong to the user of the process")
        return content(handle).decode(errors="replace")

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._here)

    def remove(self) -> None:
        """Remove the folder, even if the process has just renamed it."""
        with suppress(OSError):
            for name in os.listdir(self._here):
                self.unlink(name)
        for name in (self._name, f"{self._name}-gone"):
            with suppress(OSError):
                os.rmdir(name, dir_fd=self._parent)
