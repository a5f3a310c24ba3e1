"""Where dumps go: a folder of this user's own, in one that may be shared, whose mode stays as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvfix.probes import alarm, dump
from kvfix_tools.dump import processes

OWN = f"kvfix-{os.getuid()}"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's folder for everybody, as /tmp is, or an emptyDir of Kubernetes."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(folder))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_shared_folder_stays_as_it_is(shared: Path) -> None:
    written = Path(dump.write("signal"))
    assert written.parent == shared / OWN
    assert (mode(shared), mode(written.parent), mode(written)) == (0o1777, 0o700, 0o600)


def test_a_folder_that_is_not_there_is_made(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(shared / "a/b"))
    assert Path(dump.write("signal")).parent == shared / "a/b" / OWN


def test_a_planted_link_is_not_followed(shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (shared / OWN).symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        dump.write("signal")
    assert list(elsewhere.iterdir()) == []
    assert mode(elsewhere) == 0o755


def test_a_folder_that_others_can_write_to_is_refused(shared: Path) -> None:
    (shared / OWN).mkdir()
    (shared / OWN).chmod(0o777)
    with pytest.raises(OSError, match="is open to other users"):
        dump.write("signal")
    assert mode(shared / OWN) == 0o777
    assert list((shared / OWN).iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_a_folder_of_another_user_is_refused(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shared / OWN).mkdir(mode=0o700)
    os.chown(shared / OWN, 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user") as raised:
        dump.write("signal")
    alarm.cannot_write(raised.value)
    assert f"{shared / OWN} belongs to another user): name another folder in KVFIX_DUMP_DIR" in caplog.text


def test_a_child_removes_nothing_of_its_parent(shared: Path) -> None:
    dump.announce()
    pid = os.fork()
    if pid == 0:
        dump.withdraw()
        for _ in range(dump.FILES + 1):
            dump.write("signal")
        os._exit(0)
    os.waitpid(pid, 0)
    assert (shared / OWN / f"kvfix-{os.getpid()}.ready").exists()
    dump.withdraw()
    assert not list((shared / OWN).glob("*.ready"))


class TestWhoReads:
    """`kvfix dump`, perhaps as root, believes what lies in a folder of the process' own user only."""

    @pytest.fixture
    def process(self, shared: Path) -> Any:
        dump.announce()
        (found,) = processes.tree(os.getpid())[:1]
        return found

    def test_its_own_is_read(self, process: Any) -> None:
        assert processes.ready(process)["pid"] == os.getpid()

    def test_a_linked_folder_is_not(self, process: Any, shared: Path) -> None:
        (shared / OWN).rename(shared / "moved")
        (shared / OWN).symlink_to(shared / "moved")
        assert processes.ready(process) == {}

    def test_a_linked_file_is_not(self, process: Any, shared: Path) -> None:
        file = shared / OWN / f"kvfix-{os.getpid()}.ready"
        file.rename(shared / "moved")
        file.symlink_to(shared / "moved")
        assert processes.ready(process) == {}

    def test_another_users_is_not(self, process: Any) -> None:
        assert processes.ready(process._replace(owner=process.owner + 1)) == {}
