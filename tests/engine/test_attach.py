"""Run `kvfix attach` and `kvfix detach` on a real engine under load. The engine starts without kvfix."""

import json
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.look import attach, inject, ptrace
from tests.bench import serve
from tests.conftest import release
from tests.engine import start
from tests.engine.start import CROWD, REPORT
from tests.engine.vllm_server import ask_all

#: How often a test detaches and attaches kvfix. A hundred times take ten minutes.
PAIRS = int(os.environ.get("KVFIX_TEST_PAIRS", "3"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900 + 40 * PAIRS),
    pytest.mark.skipif(not ptrace.MACHINE, reason="kvfix cannot call into a process of this machine"),
]

HARD = [*REPORT, *CROWD]
CALM = CROWD[:2]
#: After a detach, this code writes (functions that are still wrapped, count of ever wrapped functions, RSS in kB).
ORIGINALS = """
import inspect
import json
from kvfix.session import session
left = [f.name for f in session.wrapped.values() if inspect.getattr_static(f.owner, f.name) is not f.original]
memory = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
open(ANSWER, "w").write(json.dumps([left, len(session.wrapped), memory]))
"""


def applied(capsys: pytest.CaptureFixture[str]) -> set[str]:
    found = json.loads(capsys.readouterr().out)
    return {row["code"] for each in found for row in each["rows"] or () if row["verdict"] == "applied"}


def wait_for_rounds(folder: Path, kind: str, more: int) -> None:
    begun, until = (folder / "log").read_text().count(f"{kind} round"), time.monotonic() + 200
    while (folder / "log").read_text().count(f"{kind} round") < begun + more:
        assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("plain")
    ran = start.run(folder, apply=False, transfer=None, environment=start.ONE_PROCESS, rounds=[CALM, HARD])
    return list(ran.answer["rounds"])


@pytest.mark.parametrize(
    ("version", "server", "codes", "pairs"),
    [
        # The requests of LMCache's issue 2158 (REPORT) kill this engine without KVF001 (test_engine.py).
        ("0.3.10", False, {"KVF001", "KVF002"}, PAIRS),
        pytest.param("0.5.6", False, {"KVF007"}, 1, marks=start.LONG),
        ("0.5.6", True, {"KVF106"}, PAIRS // 3),
    ],
)
def test_attach_and_detach_under_load(
    version: str, server: bool, codes: set[str], pairs: int, plain: list[Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    right = dict(zip(("calm", "hard"), plain, strict=True))
    folder = tmp_path / "engine"
    memory: list[dict[int, int]] = []

    def come_and_go(pid: int) -> None:
        try:
            capsys.readouterr()
            wait_for_rounds(folder, "calm", 2)
            assert attach.attach(pid, "fix", None, False, 120, json=True) == 0
            assert codes <= applied(capsys)
            (folder / "hard").touch()
            wait_for_rounds(folder, "hard", 2)
            (folder / "hard").unlink()
            wait_for_rounds(folder, "calm", 1)
            for number in range(pairs):
                mode = ("fix", "check")[number % 2]
                assert attach.detach(pid, 120, json=True) == 0
                pids = [each["pid"] for each in json.loads(capsys.readouterr().out)]
                found = {each: json.loads(inject.run(each, ORIGINALS, seconds=20)) for each in pids}
                assert all(not left for left, _, _ in found.values())
                assert any(wrapped for _, wrapped, _ in found.values())
                memory.append({each: kilobytes for each, (_, _, kilobytes) in found.items()})
                assert attach.attach(pid, mode, None, False, 120, json=True) == 0
                assert codes <= applied(capsys)
            assert attach.status(pid, json=True) == 0
            assert codes <= applied(capsys)
            (folder / "hard").touch()
            wait_for_rounds(folder, "hard", 1)
        finally:
            (folder / "stop").touch()

    with start.server() if server else nullcontext(start.v1(256 if version == "0.3.10" else 64)) as transfer:
        ran = start.run(
            folder, apply=False, transfer=transfer, lmcache=release(version), limit=start.LIMIT + 30 * pairs,
            when=("calm round 1 ", come_and_go), calm=CALM, hard=HARD, flags=str(folder),
        )  # fmt: skip
    assert ran.answer["preemptions"] > 0
    assert ran.count("load") > 0
    assert [at for at, (kind, answers) in enumerate(ran.answer["rounds"]) if answers != right[kind]] == []
    for pid in memory[0]:
        assert memory[-1][pid] < memory[0][pid] + 32 * 1024, memory


@start.LONG
def test_vllm_serve(plain: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers.append(ask_all(server.url, HARD))

    def after(rounds: int) -> None:
        more = len(answers) + rounds
        while len(answers) < more:
            assert loading.is_alive()
            time.sleep(0.1)

    with serve.running(tmp_path, "") as server:
        pid = server.process.pid
        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        try:
            after(1)
            for mode in ("fix", "check"):
                assert attach.attach(pid, mode, None, False, 120, json=True) == 0
                after(2)
                capsys.readouterr()
                assert attach.status(pid, json=True) == 0
                assert "KVF007" in applied(capsys)
                assert attach.detach(pid, 120, json=True) == 0
                after(1)
        finally:
            stop.set()
            loading.join(300)
        assert server.metric(serve.PREEMPTIONS) > 0
    assert len(answers) >= 7
    assert [at for at, each in enumerate(answers) if each != plain[1]] == []
