"""Files of this process: written atomically, in a folder that only its owner can read."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

#: Environment variable: the folder in which each user gets a private folder. Default: the folder for temporary files.
DIRECTORY = "KVFIX_DUMP_DIR"

#: A recorder file, its report, or an unfinished part of one. The group is the time of the file in milliseconds.
_DATED = re.compile(r"kvfix-\d+-(\d+)-\d+-\w+\.(?:jsonl|txt)")
#: Numbers for the names of files.
numbers = count(1)


@contextmanager
def folder() -> Iterator[tuple[str, int]]:
    """Path and descriptor of the private folder, created with mode 0700. Raises OSError if others can access it.

    The parent folder may be shared (1777): our name in it may be a link, or a folder of another user. kvfix does not
    change the mode of the parent. Files are created through the descriptor, so a later change of the path has no
    effect.
    """
    shared = os.environ.get(DIRECTORY) or tempfile.gettempdir()
    os.makedirs(shared, mode=0o700, exist_ok=True)
    path = os.path.join(shared, f"kvfix-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):  # for a clear message: O_NOFOLLOW refuses it too
        raise PermissionError(errno.EPERM, f"{path} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{path} belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, f"{path} is open to other users (chmod 700, or remove it)")
        yield path, descriptor
    finally:
        os.close(descriptor)


def write(folder: tuple[str, int], name: str, content: bytes) -> str:
    """Write the file under another name and rename it: a reader finds the whole file or none. Return its path."""
    path, descriptor = folder
    part = f"{name}.{os.getpid()}.{next(numbers)}.part"  # two threads may write the same file
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=descriptor)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        remove(os.path.join(path, part))
        raise
    return os.path.join(path, name)


def keep_newest(folder: tuple[str, int], most: int) -> None:
    """Keep `most` recorder files and reports of all processes. Remove the oldest ones."""
    _, descriptor = folder
    dated = sorted((int(found[1]), name) for name in os.listdir(descriptor) if (found := _DATED.match(name)))
    for _, name in dated[: max(0, len(dated) - most)]:
        with suppress(OSError):  # another process has removed it
            os.unlink(name, dir_fd=descriptor)


def remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
