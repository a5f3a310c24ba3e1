"""The processes that `kvfix dump` finds, and which files it believes: those of the process' own user only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfix.connector_events import dump
from kvfix_tools.dump import processes


def test_children_follow_their_parents() -> None:
    """With the kernel's letter for the state, and the start by which a ready file names a process."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        parent, child = processes.tree(process.pid)
        process.communicate(b"\n")
    assert (parent.pid, child.parent) == (process.pid, process.pid)
    assert parent.state == "S"
    assert parent.command == [sys.executable, "-c", program]
    assert 0 < parent.began <= child.began
    assert processes.tree(process.pid) == []


def test_only_a_file_of_its_own_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has announced that it answers. Neither a linked folder nor that of another user is read."""
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(tmp_path))
    dump.announce()
    process = processes.tree(os.getpid())[0]
    announced = processes.ready(process)
    assert (announced["pid"], announced["began"]) == (os.getpid(), process.began)
    assert processes.ready(process._replace(owner=process.owner + 1)) == {}
    own = tmp_path / f"kvfix-{os.getuid()}"
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    assert processes.ready(process) == {}
