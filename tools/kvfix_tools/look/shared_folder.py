"""Exchange files with the process that kvfix reads, in a folder such as /tmp.

kvfix may be root, and the user of the process may replace a file by a link at any time. So kvfix opens each folder of
the path once, without following a link. kvfix creates, reads and removes files through the descriptor of the folder.
"""

import os
import stat
import time
from contextlib import suppress


def opened(root: int, path: str, flags: int) -> int:
    """Open the file `path` below the folder `root`, and close `root`. Raise OSError if a part of `path` is a link."""
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
    """Read an open file, and close it. Raise OSError for a pipe or a device, because reading might never end."""
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a regular file")
        return file.read()


class SharedFolder:
    """Access the files of one folder. The object closes `folder`, a descriptor. Methods use only a path's file name."""

    def __init__(self, folder: int, user: int) -> None:
        self._here, self._user = folder, user

    def __del__(self) -> None:
        os.close(self._here)

    def has(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            return os.stat(os.path.basename(path), dir_fd=self._here, follow_symlinks=False).st_uid == self._user
        return False

    def write(self, path: str, text: str) -> None:
        """Write a file that belongs to the user of the process. Replace an existing file."""
        part = f"{os.path.basename(path)}.{os.getpid()}-{time.monotonic_ns()}.new"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._here)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchown(handle, self._user, -1)
        os.replace(part, os.path.basename(path), src_dir_fd=self._here, dst_dir_fd=self._here)

    def read(self, path: str) -> str:
        handle = os.open(os.path.basename(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._here)
        if os.fstat(handle).st_uid != self._user:
            os.close(handle)
            raise PermissionError(f"{path} does not belong to the user of the process")
        return content(handle).decode(errors="replace")

    def unlink(self, path: str) -> None:
        os.unlink(os.path.basename(path), dir_fd=self._here)
