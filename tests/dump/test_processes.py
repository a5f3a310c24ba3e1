"""The processes that `kvfix dump` finds, and which files it believes: those of the process' own user only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfix.connector_events import dump
from kvfix_tools.dump import processes
from kvfix_tools.dump.processes import Process

OWN = f"kvfix-{os.getuid()}"


def test_children_follow_their_parents() -> None:
    """With the kernel's letter for the state, and the start by which a ready file names a process."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        parent, child = processes.tree(process.pid)
        process.communicate(b"\n")
    assert (parent.pid, child.parent) == (process.pid, process.pid)
    assert parent.state == "S"
    assert parent.command == [sys.executable, "-c", program]
    assert 0 < parent.began <= child.began
    assert processes.tree(process.pid) == []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def process(shared: Path) -> Process:
    """This one, which has announced that it answers."""
    dump.announce()
    return processes.tree(os.getpid())[0]


def test_its_own_file_is_read(process: Process) -> None:
    announced = processes.ready(process)
    assert (announced["pid"], announced["began"]) == (os.getpid(), process.began)


def test_a_linked_folder_is_not(process: Process, shared: Path) -> None:
    (shared / OWN).rename(shared / "moved")
    (shared / OWN).symlink_to(shared / "moved")
    assert processes.ready(process) == {}


def test_another_users_is_not(process: Process) -> None:
    assert processes.ready(process._replace(owner=process.owner + 1)) == {}
