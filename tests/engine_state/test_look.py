import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvfix_tools.look import command, inject, looking
from kvfix_tools.roundtrip import real_engine
from tests.conftest import ROOT, Fresh, clean_environment
from tests.dump.test_dump import hanging

COMMAND = [sys.executable, "-m", "kvfix_tools.cli", "look"]
READY = "import signal; print('ready', flush=True); signal.pause()"  # a program without kvfix that waits


@contextmanager
def running(folder: Path, *command: str, prints: tuple[str, ...] = ("ready\n",)) -> Iterator[Any]:
    """Run a program. Yield its process when the file `log` in the folder contains all texts of `prints`."""
    environment, log = clean_environment(), folder / "log"
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    with real_engine.started([*command], log, environment, cwd=ROOT) as process:
        assert all(real_engine.wait_for(line, log, process, 120) for line in prints), log.read_text()
        yield process
        assert process.poll() is None  # `kvfix look` has not ended the program


RUN = Fresh(120).run


def look(pid: int, *options: str) -> subprocess.CompletedProcess[str]:
    return RUN([*COMMAND, str(pid), *options])


def watched(pid: int, draws: int) -> tuple[int, str]:
    """Let `kvfix look --watch` draw `draws` times, then interrupt it. Return its exit code and all drawn text."""
    ours, its = pty.openpty()
    # A background job of a shell ignores SIGINT, and so do the children of the job. So restore SIGINT.
    with subprocess.Popen(
        [*COMMAND, str(pid), "--watch"], env=clean_environment(TERM="xterm", COLUMNS="240"), stdout=its, stderr=its,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        os.close(its)
        text = b""
        while text.count(b"per second") < draws:
            text += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # raised when the process has ended
            while True:
                text += os.read(ours, 65536)
    os.close(ours)
    return process.returncode, text.decode(errors="replace")


def test_an_engine_that_cannot_move(tmp_path: Path) -> None:
    file = tmp_path / "state"
    program = [sys.executable, "-m", "tests.engine_state.wedged", "locked_out_engine"]
    with running(tmp_path, *program, prints=("runs\n",)) as process:
        pid = process.pid
        ways = (["--json", "--save", str(file)], [], ["--request", "low"], ["--request", "other"])
        done, text, one, none = (look(pid, *options) for options in ways)
        code, drawn = watched(pid, 2)
    assert (done.returncode, text.returncode, one.returncode, none.returncode, code) == (1, 1, 1, 2, 1)
    assert drawn.count("KVD202 nothing-moves") >= 2
    assert re.search(r"; per second: \d+ steps, 0 tokens, 0\.0 ended requests", drawn), drawn
    answer = json.loads(done.stdout)
    (verdict,) = answer["verdicts"]
    assert (verdict["code"], verdict["request"], verdict["fixes"]) == ("KVD202", "r", ["KVF208", "KVF210", "KVF219"])
    assert answer["owes"] == {"r": "free blocks: it needs 8, 4 are free", "low": "r, which is before it in the queue"}
    assert [(way["pid"], way["how"]) for way in answer["ways"]] == [(pid, looking.INSIDE)]
    assert text.stdout.startswith("1 request is loaded and waits behind r, which needs 8 blocks; 4 are free")
    assert "waits for    r, which is before it in the queue" in one.stdout
    assert os.stat(file).st_mode & 0o777 == 0o600
    rows = json.loads(file.read_text())["processes"][0]["scheduler"]["requests"]
    assert [len(row["block_ids"][0]) for row in rows] == [8, 8]


def test_a_process_stuck_in_native_code(tmp_path: Path) -> None:
    """kvfix cannot run code in this process, but the process's stack shows the hook."""
    with hanging(tmp_path, "deaf") as process:
        done = look(process.pid)
    assert done.returncode == 1, done.stderr
    assert "has been in start_load_kv for at least " in done.stdout.splitlines()[0]
    assert "by its stacks only, because " in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_without_rights(tmp_path: Path) -> None:
    with running(tmp_path, sys.executable, "-c", READY) as process:
        code = "import os, sys; from kvfix_tools.look import command; os.setuid(65534)\n"
        code += "sys.exit(command.look(int(sys.argv[1]), watch=False, request='', json=False, save=''))"
        done = RUN([sys.executable, "-c", code, str(process.pid)])
    assert done.returncode == 77, done.stdout + done.stderr
    assert "Run kvfix as the user of the process (id 0), or as root." in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to take rights away")
def test_in_a_container_without_ptrace(tmp_path: Path) -> None:
    """In a container without SYS_PTRACE, root may not trace a process with a capability that root lacks."""
    with running(tmp_path, sys.executable, "-c", f"import torch; {READY}") as process:
        done = RUN(["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", *COMMAND, str(process.pid)])
    assert done.returncode == 77, done.stdout + done.stderr
    reason = "may not be traced; Permission denied (os error 13). Start the container with --cap-add SYS_PTRACE"
    assert reason in done.stderr


def test_there_is_no_such_process() -> None:
    done = look(4_190_000)
    assert done.returncode == 2
    assert "kubectl debug --target" in done.stderr
    assert look(4_190_000, "--core", "file").returncode == 2


@pytest.mark.parametrize("command", [(sys.executable, "-c", READY), ("sh", "-c", "echo ready; exec tail -f /dev/null")])
def test_a_process_without_vllm_is_not_stopped(command: tuple[str, ...], tmp_path: Path) -> None:
    with running(tmp_path, *command) as process:
        done = look(process.pid)
    assert done.returncode == 2
    assert f"process {process.pid} (" in done.stderr
    assert "nor any of its child processes has loaded vLLM or LMCache" in done.stderr
    assert not list(Path("/tmp").glob(f"kvfix-look-{process.pid}-*"))


def test_an_engine_at_work_in_a_container(tmp_path: Path) -> None:
    """The shell runs an engine, plain Python, and PyTorch without vLLM. kvfix reads only the engine."""
    others = [READY, f"import torch; print('torch', flush=True); {READY}"]
    engine = f"{sys.executable} -m tests.engine_state.wedged empty_engine 2>&-"
    script = " & ".join([engine, *(f'{sys.executable} -c "{code}"' for code in others), "wait"])
    with running(tmp_path, "sh", "-c", script, prints=("ready\n", "torch\n", "runs\n")) as process:
        found = looking.engine_of(process.pid)
        done, unsaved = (look(process.pid, *more) for more in (["--json"], ["--save", str(tmp_path / "no/state")]))
        looker = looking.Looker(found, full=False)
        states = [looker.look().processes[0] for _ in range(20)]
    assert [each.command[2] for each in found] == ["tests.engine_state.wedged"]
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["verdicts"] == []
    assert not [state["unread"] for state in states if state["unread"]]
    assert states[-1]["scheduler"]["steps"] > states[0]["scheduler"]["steps"]
    stops, error = unsaved.stderr.splitlines()
    assert stops.startswith(f"kvfix look stops each of these processes for a moment: {found[0].pid} (")
    assert (unsaved.returncode, error) == (2, f"kvfix look: {tmp_path}/no/state: No such file or directory")


def test_kvfix_does_not_read_itself() -> None:
    code = "import os, torch; from kvfix_tools.look import looking; print(looking.engine_of(os.getpid()))"
    done = RUN([sys.executable, "-c", code])
    assert done.stdout == "[]\n", done.stderr


def test_a_core_file(tmp_path: Path) -> None:
    """core.txt has stacks in the format of PyStack 1.7. Without PyStack, kvfix says how to install PyStack."""
    main, other = map(looking.of_stack, command.stacks(Path(__file__).with_name("core.txt").read_text()).values())
    assert main["hook"] == "start_load_kv"
    assert main["stack"][0] == "start_load_kv (vllm/lmcache_mp_connector.py:900)"
    assert other == {"stack": ["wait (python3.11/threading.py:327)"], "hook": ""}
    done = RUN([*COMMAND, "--core", "x"], PATH=str(tmp_path))
    assert done.returncode == 77
    assert "pip install pystack" in done.stderr


def test_without_rights_kvfix_in_the_process_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "run", mock.Mock(side_effect=inject.Refused("it may not be traced", "a setting")))
    with hanging(tmp_path) as process:
        looker = looking.Looker(looking.engine_of(process.pid), full=False)
        (state,) = looker.look().processes
    assert (state["schema"], state["hook"], state["kvfix"]["mode"]) == (1, "start_load_kv", "observe")
    assert state["stack"][0].startswith("wait (")
    way = looker.ways[process.pid]
    assert (way.how, way.setting) == (looking.RECORDER, "a setting")
