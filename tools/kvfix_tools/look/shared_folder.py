"""A folder in which kvfix and a process that it looks at exchange files.

kvfix may be root, and the user of the process may rename the folder, or put a link in its place, at any time. So each
folder on the way is opened once, without following a link, and each file is made, read and removed through the
descriptor of its folder.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def opened(root: int, path: str, flags: int) -> int:
    """Open the file at this path below the folder `root` without following a link. Closes `root`. Raises OSError."""
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
    """Read an open file, and close it. Raises OSError for a pipe or a device, which might never end."""
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("no regular file")
        return file.read()


class SharedFolder:
    """parent: descriptor of the folder in which it is; it is closed with this object. inside: its path in the process.
    user: of the process. Raises OSError."""

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
        """Make the folder, and give it to this user. Raises OSError, also if it was exchanged meanwhile."""
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
        """Whether it is still in its place: the process removes it after a call that was given up."""
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
        """Write a file of the user of the process. Its name may be there: that one is replaced."""
        part = f"{name}.{os.getpid()}-{time.monotonic_ns()}.new"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._here)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchown(handle, self._user, -1)
        os.replace(part, name, src_dir_fd=self._here, dst_dir_fd=self._here)

    def read(self, name: str) -> str:
        """The text of a file of the user. Raises OSError."""
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._here)
        if os.fstat(handle).st_uid != self._user:
            os.close(handle)
            raise PermissionError(f"{self.inside}/{name} is not of the user of the process")
        return content(handle).decode(errors="replace")

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._here)

    def remove(self) -> None:
        """Remove the folder, also one that the process has just renamed to remove it."""
        with suppress(OSError):
            for name in os.listdir(self._here):
                self.unlink(name)
        for name in (self._name, f"{self._name}-gone"):
            with suppress(OSError):
                os.rmdir(name, dir_fd=self._parent)
