"""kvfix writes dumps into a private folder of the user. kvfix does not change the mode of the parent folder."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfix.connector_events import recorder, signals, violations
from kvfix.ledger import Finding
from kvfix.session import session

OWN = f"kvfix-{os.getuid()}"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that every user can write to, like /tmp or an emptyDir of Kubernetes."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(folder))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_mode_of_a_shared_folder_does_not_change(shared: Path) -> None:
    written = Path(recorder.write("signal"))
    assert written.parent == shared / OWN
    assert (mode(shared), mode(written.parent), mode(written)) == (0o1777, 0o700, 0o600)


@pytest.mark.parametrize(("is_link", "says"), [(True, "is a link"), (False, "is open to other users")])
def test_a_planted_link_and_a_folder_open_to_others(is_link: bool, says: str, shared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" if is_link else shared / OWN
    folder.mkdir()
    folder.chmod(0o755 if is_link else 0o777)
    if is_link:
        (shared / OWN).symlink_to(folder)
    before = mode(folder)
    with pytest.raises(OSError, match=says):
        recorder.write("signal")
    assert (list(folder.iterdir()), mode(folder)) == ([], before)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user's")
def test_a_folder_of_another_user_is_rejected(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shared / OWN).mkdir(mode=0o700)
    os.chown(shared / OWN, 12345, 12345)
    assert violations.written(recorder.write, "signal") == ""
    assert f"{shared / OWN} belongs to another user): name another folder in KVFIX_DUMP_DIR" in caplog.text


def test_a_child_removes_nothing_of_its_parent(shared: Path) -> None:
    signals.write_announcement()
    pid = os.fork()
    if pid == 0:
        signals.withdraw()
        for _ in range(recorder.FILES + 1):
            recorder.write("signal")
        os._exit(0)
    os.waitpid(pid, 0)
    assert (shared / OWN / f"kvfix-{os.getpid()}.ready").exists()
    signals.withdraw()
    assert not list((shared / OWN).glob("*.ready"))


def test_a_crash_loop_does_not_fill_the_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvfix limits the files of all processes together, because each process of a crash loop has a new pid."""
    monkeypatch.setattr(recorder, "FILES_OF_ALL", 6)
    own = shared / OWN
    own.mkdir(mode=0o700)
    for pid in range(1, 5):
        for ending in ("violation.jsonl", "violation.txt", "signal.jsonl.4.7.part"):
            (own / f"kvfix-{9 - pid}-{1_000 + pid}-1-{ending}").touch()
    others = ["kvfix-77.ready", "notes.txt", "kvfix-dump-1.tar.gz"]
    for name in others:
        (own / name).touch()
    written = Path(recorder.write("signal"))
    left = sorted(path.name for path in own.iterdir())
    assert set(others) < set(left)
    assert len(left) == 6 + len(others)
    assert written.name in left
    assert not [name for name in left if "-1001-" in name or "-1002-" in name]  # the oldest files are gone


def test_a_rule_is_logged_after_all_reports(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "reports", violations.DUMPS)
    monkeypatch.setattr(session, "violations", {})
    watched = SimpleNamespace(name="LMCacheConnectorV1")
    for code in ("KVR001", "KVR002", "KVR001"):
        finding = Finding(code, f"rule-{code}", "violated", f"r{len(session.violations)}", "1 is not 2", None, None)
        violations.report(watched, "get_finished", finding, None)  # type: ignore[arg-type]
    assert [line.partition(" ")[0] for line in caplog.messages] == ["KVR001", "KVR002"]
    assert "No report: the limit of 16 per process is reached." in caplog.text
