"""kvfix as root writes to no file that the user of a process names, and reads only files of that user."""

import os
from pathlib import Path

import pytest

from kvfix_tools.look import shared_folder
from kvfix_tools.look.shared_folder import SharedFolder

#: The user of the process. Only root can give the folder to another user.
USER = 12345 if os.getuid() == 0 else os.getuid()


class Places:
    """/tmp of the process, to which its user may write, and files of root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp, self.elsewhere, self.secret = root / "tmp", root / "elsewhere", root / "secret"
        self.tmp.mkdir()
        self.elsewhere.mkdir()
        self.secret.write_text("of root")

    def parent(self) -> int:
        return shared_folder.opened(os.open(self.root, os.O_PATH), "/tmp", os.O_PATH | os.O_DIRECTORY)

    def make(self) -> SharedFolder:
        return SharedFolder.make(self.parent(), "/tmp/kvfix-look-1-a", USER)

    def exchange(self, target: Path) -> None:
        """Its user puts a link in the place of the folder."""
        (self.tmp / "kvfix-look-1-a").rename(self.tmp / "moved")
        (self.tmp / "kvfix-look-1-a").symlink_to(target)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def test_files_go_to_and_fro(places: Places) -> None:
    folder = places.make()
    folder.write("code", "1")
    folder.write("code", "2")
    made = places.tmp / "kvfix-look-1-a"
    found = folder.read("code"), folder.has("code"), folder.has("answer"), folder.is_there()
    assert found == ("2", True, False, True)
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in made.iterdir()} == {(USER, 0o600)}
    assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (USER, 0o700)
    assert SharedFolder(places.parent(), folder.inside, USER).is_of_user()
    folder.remove()
    assert list(places.tmp.iterdir()) == []
    assert not folder.is_there()
    with pytest.raises(FileNotFoundError):
        folder.write("code", "3")


LINK = "Not a directory|Too many levels"


@pytest.mark.parametrize(
    ("what", "error"),
    [("secret", LINK), ("elsewhere", LINK), ("a folder with files", "not the folder that was made")],
)
def test_a_folder_that_is_exchanged_while_it_is_made(
    what: str, error: str, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def raced(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if what != "a folder with files":
            places.exchange(getattr(places, what))
            return
        (places.tmp / name).rename(places.tmp / "moved")
        (places.elsewhere / "a").touch()
        places.elsewhere.chmod(0o700)
        places.elsewhere.rename(places.tmp / name)

    monkeypatch.setattr(os, "mkdir", raced)
    with pytest.raises(OSError, match=error):
        places.make()
    assert (places.tmp / "kvfix-look-1-a").stat().st_uid == os.getuid()


def test_a_folder_that_is_exchanged_later(places: Places) -> None:
    folder = places.make()
    places.exchange(places.elsewhere)
    folder.write("code", "x")
    folder.remove()
    assert list(places.elsewhere.iterdir()) == []
    assert not folder.is_there()
    assert (places.tmp / "kvfix-look-1-a").is_symlink()


def test_a_planted_file_is_neither_written_nor_read(places: Places) -> None:
    folder = places.make()
    made = places.tmp / "kvfix-look-1-a"
    (made / "code").symlink_to(places.secret)
    folder.write("code", "x")
    assert places.secret.read_text() == "of root"
    (made / "answer").symlink_to(places.secret)
    with pytest.raises(OSError, match="Too many levels"):
        folder.read("answer")
    (made / "answer").unlink()
    os.mkfifo(made / "answer")
    os.chown(made / "answer", USER, -1)
    with pytest.raises(OSError, match="not a regular file"):
        folder.read("answer")
    if os.getuid() == 0:
        (made / "answer").unlink()
        os.link(places.secret, made / "answer")
        with pytest.raises(PermissionError, match="does not belong to the user"):
            folder.read("answer")


def test_no_link_on_the_way_is_followed(places: Places) -> None:
    (places.root / "var").symlink_to(places.root / "tmp")
    for path in ("/var/kvfix-look-1-a", "/var"):
        with pytest.raises(OSError, match=LINK):
            shared_folder.opened(os.open(places.root, os.O_PATH), path, os.O_PATH | os.O_DIRECTORY)
