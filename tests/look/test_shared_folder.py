"""Even as root, kvfix follows no link that another user made. kvfix reads only files that the engine's user owns."""

import os
from pathlib import Path

import pytest

from kvfix_tools.look import shared_folder
from kvfix_tools.look.shared_folder import SharedFolder

USER = 12345 if os.getuid() == 0 else os.getuid()  # only root can give a file to another user


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("of root")
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def opened(tmp: Path, path: str = "/tmp") -> SharedFolder:
    return SharedFolder(shared_folder.opened(os.open(tmp.parent, os.O_PATH), path, os.O_PATH | os.O_DIRECTORY), USER)


def test_files_are_written_and_read(tmp: Path) -> None:
    folder = opened(tmp)
    for text in ("1", "2"):
        folder.write("/tmp/code", text)
    assert (folder.read("/tmp/code"), folder.has("/tmp/code"), folder.has("/tmp/answer")) == ("2", True, False)
    (path,) = tmp.iterdir()
    assert (path.name, path.stat().st_uid, path.stat().st_mode & 0o777) == ("code", USER, 0o600)
    folder.unlink("/tmp/code")
    assert list(tmp.iterdir()) == []


def test_a_planted_file_is_neither_written_nor_read(tmp: Path) -> None:
    folder, secret, answer = opened(tmp), tmp.parent / "secret", tmp / "answer"
    (tmp / "code").symlink_to(secret)
    folder.write("code", "x")
    assert secret.read_text() == "of root"
    answer.symlink_to(secret)
    with pytest.raises(OSError, match="Too many levels"):
        folder.read("answer")
    answer.unlink()
    os.mkfifo(answer)
    os.chown(answer, USER, -1)
    with pytest.raises(OSError, match="not a regular file"):
        folder.read("answer")
    if os.getuid() == 0:
        answer.unlink()
        os.link(secret, answer)
        assert not folder.has("answer")
        with pytest.raises(PermissionError, match="does not belong to the user"):
            folder.read("answer")


def test_a_folder_that_is_exchanged_later(tmp: Path) -> None:
    folder = opened(tmp)
    tmp.rename(tmp.parent / "moved")
    (tmp.parent / "elsewhere").mkdir()
    tmp.symlink_to(tmp.parent / "elsewhere")
    folder.write("code", "x")
    assert [path.name for path in (tmp.parent / "moved").iterdir()] == ["code"]
    assert list(tmp.iterdir()) == []


def test_no_link_on_the_way_is_followed(tmp: Path) -> None:
    (tmp.parent / "var").symlink_to(tmp)
    for path in ("/var/folder", "/var"):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            opened(tmp, path)
