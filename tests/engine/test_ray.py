"""A real vLLM engine of two ranks whose workers are Ray actors: kvfix is in each, and their records are one.

Real: vLLM's Ray executor, a local Ray cluster, two ranks, LMCache. Stand-ins: LMCache's GPU connector, and the platform
(plugin/kvfix_engine_ray.py). The cluster is started without a word of kvfix: all that it has comes from vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import merge, recording, replay
from kvfix_tools.dump import processes
from tests.conftest import ROOT, clean_environment
from tests.engine import run as engine
from tests.engine.run import CROWD, Ran
from tests.engine.server import free_port

pytest.importorskip("ray", reason="ray is not installed here: its engine is not run")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RANKS = 2
#: Of a request, in EngineCore: now all ranks serve.
SERVES = "LMCache hit tokens"


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, int]]:
    """A node of its own: its address, and the pid of the process that all of it is below."""
    port = free_port()
    places = [ROOT / "tests/engine/plugin", ROOT / "patches", ROOT / "tools"]
    settings = {"KVFIX_TEST_RAY": "1", "KVFIX_TEST_REPORT": str(folder / "engine/report"), "PYTHONHASHSEED": "0"}
    environment = clean_environment(PYTHONPATH=os.pathsep.join(map(str, places)), **settings)
    with tempfile.TemporaryDirectory(prefix="kvfix-ray-") as sockets, open(folder / "ray.log", "w+") as log:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        command += ["--num-cpus=2", f"--num-gpus={RANKS}", "--include-dashboard=false", "--disable-usage-stats"]
        command += ["--object-store-memory=100000000", f"--temp-dir={sockets}"]
        command += [f"--ray-client-server-port={free_port()}"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            engine.wait_for("Ray runtime started", folder / "ray.log", process)
            assert process.poll() is None, (folder / "ray.log").read_text()
            yield f"127.0.0.1:{port}", process.pid
        finally:
            for each in reversed(processes.tree(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            process.wait()


class Served:
    """`ran`, the bundle that `kvfix dump` made of the engine meanwhile, and the pids below the Ray cluster then."""

    def __init__(self, folder: Path) -> None:
        self.dumped: dict[str, Any] = {}
        self.below_ray: set[int] = set()
        with cluster(folder) as (address, pid):

            def dump(engine_pid: int) -> None:
                self.below_ray = {each.pid for each in processes.tree(pid)}
                command = [
                    sys.executable,
                    "-m",
                    "kvfix_tools.cli",
                    "dump",
                    str(engine_pid),
                    "-o",
                    str(folder),
                    "--json",
                ]
                done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
                self.dumped = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}

            more = {"distributed_executor_backend": "ray", "tensor_parallel_size": RANKS}
            self.ran: Ran = engine.run(
                folder / "engine", apply=True, transfer=engine.v1(64), rounds=[CROWD, CROWD], mode="check",
                engine={**engine.ENGINE, **more}, when=(SERVES, dump),
                environment={"RAY_ADDRESS": address, "KVFIX_TEST_RAY": "1"},
            )  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("ray"))


def workers(served: Served) -> list[dict[str, Any]]:
    return [line for line in served.ran.said if line["what"] == "connector" and line["role"] == "WORKER"]


def test_it_serves(served: Served) -> None:
    assert served.ran.answer is not None, served.ran.log[-3000:]
    assert served.ran.answer["preemptions"] > 0
    assert served.ran.count("load") > 0
    assert served.ran.answer["rounds"][0] == served.ran.answer["rounds"][1]
    assert "Report: " not in served.ran.log
    assert "a fault of kvfix itself" not in served.ran.log


def test_fixes_reach_every_actor(served: Served) -> None:
    found = workers(served)
    assert len({line["pid"] for line in found}) == RANKS
    assert {line["pid"] for line in found} <= served.below_ray
    for line in found:
        assert line["choice"] == "check"
        assert {row["code"]: row["verdict"] for row in line["status"]}["KVF013"] == "applied"


def test_the_recorders_of_all_ranks_are_one(served: Served) -> None:
    (found,) = merge.engines(map(recording.read, served.ran.dumps("signal")[-RANKS - 2 :]))
    assert sorted(found.workers) == list(range(RANKS))
    assert found.missing == []
    assert all(compared.pairs for compared in found.compared().values())
    assert replay.replay(served.ran.dumps("signal"), json=True) == 0


def test_a_dump_of_the_engine_has_the_actors(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not below it."""
    rows = {row["pid"]: row for row in served.dumped["processes"]}
    ranks = {rank for row in rows.values() for rank in row["ranks"]}
    assert len(ranks) == RANKS + 1, served.dumped
    assert {line["pid"] for line in workers(served)} <= set(rows)
    capsys.readouterr()
    assert replay.replay([Path(served.dumped["bundle"])], json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["missing"], sorted(told["ranks"])) == ([], ["0", "1"])
