import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvfix.connector_events import signals
from kvfix_tools.dump import command, processes
from tests.conftest import clean_environment

SECRETS = {
    "LMCACHE_API_KEY": "hush",
    "LMCACHE_REMOTE_URL": "redis://user:hush@cache:6379",
    "LMCACHE_EXTRA_CONFIG": '{"a": [{"redis_password": "hush"}]}',
}
OPTIONS = ["--kv-transfer-config", '{"kv_connector_extra_config": {"remote_url": "redis://user:hush@cache:6379"}}']


@contextmanager
def hanging(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("hanging_process.py")), *arguments]
    environment = clean_environment(KVFIX_DUMP_DIR=str(folder), LMCACHE_CHUNK_SIZE="64", **SECRETS)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            yield process
        finally:
            process.kill()


def dumped(pid: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert command.dump(pid, tmp_path, json=True) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_it_says_which_process_hangs_in_which_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hanging(tmp_path / "dumps", *OPTIONS) as process:
        found = dumped(process.pid, tmp_path, capsys)
        again = dumped(process.pid, tmp_path / "dumps", capsys)  # the process continues after the signal
    assert found["processes"][0]["hook"].startswith("in start_load_kv of Connector for ")
    assert again["processes"][0]["hook"].startswith("in start_load_kv of Connector for ")
    with tarfile.open(found["bundle"]) as archive:
        parts = {each.name.partition("/")[2]: archive.extractfile(each).read().decode() for each in archive}
    pid = process.pid
    assert os.stat(found["bundle"]).st_mode & 0o777 == 0o600
    assert {"summary.txt", "processes.json", "status.json", f"recorder-{pid}.jsonl"} <= set(parts)
    assert json.loads(parts[f"recorder-{pid}.jsonl"].splitlines()[0])["reason"] == "signal"
    shown = json.loads(parts["processes.json"])[0]
    assert shown["settings"]["LMCACHE_CHUNK_SIZE"] == "64"
    assert shown["settings"]["LMCACHE_REMOTE_URL"] == "redis://<hidden>@cache:6379"
    assert SECRETS.keys() <= shown["settings"].keys()
    assert shown["command"][-2] == "--kv-transfer-config"
    assert "hush" not in "".join(parts.values())
    if f"stacks-{pid}.json" in parts:
        assert "start_load_kv" in parts[f"stacks-{pid}.json"]
    else:
        assert found["processes"][0]["stacks"]  # the stacks, or the reason why py-spy could not read the stacks


def test_workers_that_are_no_children_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's workers are children of Ray's raylet, not of the engine."""
    worker = partial(hanging, tmp_path / "dumps", "engine")
    with worker("mine") as one, worker("mine") as other, worker("another's"):
        rows = {row["pid"]: row for row in dumped(one.pid, tmp_path, capsys)["processes"]}
    assert set(rows) == {one.pid, other.pid}
    assert rows[other.pid]["ranks"] == ["rank 1 of 2 of mine"]
    assert rows[other.pid]["hook"].startswith("in start_load_kv of Connector for ")


def test_a_hook_that_blocks_signals_is_found_by_its_stacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hanging(tmp_path / "dumps", "deaf") as process:
        # Wait until the process sleeps in C, where Python cannot run a signal handler.
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        found = dumped(process.pid, tmp_path, capsys)["processes"][0]
    assert "did not run Python code for 5 s" in found["recorder"]
    assert "start_load_kv" in found["hook"] or " " in found["stacks"]


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_without_a_recorder_gets_no_signal(
    idle: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal would kill a process without kvfix's handler."""
    found = dumped(idle.pid, tmp_path, capsys)["processes"][0]
    assert idle.poll() is None
    idle.communicate(b"\n")
    assert idle.returncode == 0
    assert found["recorder"].startswith("no recorder")


def dumped_with(limit: list[str], pid: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `kvfix dump` in a separate process. limit: command line of a program that limits rights or resources."""
    command = [*limit, sys.executable, "-m", "kvfix_tools.cli", "dump", str(pid), "-o", str(folder)]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to take rights away")
def test_without_rights_nothing_is_claimed(idle: subprocess.Popen[bytes], tmp_path: Path) -> None:
    done = dumped_with(["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"], idle.pid, tmp_path)
    assert done.returncode == 77, done.stdout + done.stderr
    assert "kvfix could not read this process, which may be in a connector hook" in done.stdout
    assert "in no connector hook" not in done.stdout
    assert "Permission denied" in done.stdout
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1  # kvfix still writes the bundle, with settings and fixes


def test_a_full_disk_leaves_no_bundle(idle: subprocess.Popen[bytes], tmp_path: Path) -> None:
    done = dumped_with(["prlimit", "--fsize=512"], idle.pid, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pid in (0, -1, 2**22 + 1, 2**40):
        assert command.dump(pid, tmp_path, json=False) == 2
        assert f"there is no process {pid}" in capsys.readouterr().err
    assert command.dump(os.getpid(), tmp_path / "nowhere", json=False) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_children_follow_their_parents() -> None:
    """kvfix reads each process's state and start time. The start time shows whether a pid now names a new process."""
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
    """kvfix reads a process's `.ready` file. kvfix follows no link to a folder, and reads no folder of another user."""
    monkeypatch.setenv("KVFIX_DUMP_DIR", str(tmp_path))
    signals.write_announcement()
    process = processes.tree(os.getpid())[0]
    announced = processes.ready(process)
    assert (announced["pid"], announced["began"]) == (os.getpid(), process.began)
    assert processes.ready(process._replace(owner=process.owner + 1)) == {}
    own = tmp_path / f"kvfix-{os.getuid()}"
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    assert processes.ready(process) == {}
