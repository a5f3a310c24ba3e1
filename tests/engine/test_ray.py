"""A real vLLM engine of two ranks whose workers are Ray actors on two nodes: kvfix is in each, their records are one.

Real: vLLM's Ray executor, a local cluster of two nodes (of one machine), LMCache. Stand-ins: LMCache's GPU connector,
and the platform (plugin/kvfix_engine_ray.py). The cluster is started without a word of kvfix: all comes from vLLM.
"""

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

from kvfix_tools import engine_recordings, recording, replay
from kvfix_tools.dump import processes
from kvfix_tools.roundtrip.real_engine import free_port, wait_for
from tests.conftest import PLUGIN, clean_environment
from tests.engine import start
from tests.engine.start import CROWD, Ran

pytest.importorskip("ray", reason="ray is not installed here: its engine is not run")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RANKS = 2
#: Of all processes. A token that another cluster left in ~/.ray makes `ray start --head` alone ask for one.
RAY = {"KVFIX_TEST_RAY": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Two nodes with place for one rank each: the address, and the pids that all of each is below."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvfix-ray-") as sockets:
        more = [f"--temp-dir={sockets}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        with (
            node(folder, "head", "--head", f"--port={port}", *more) as head,
            node(folder, "other", f"--address=127.0.0.1:{port}") as other,
        ):
            yield f"127.0.0.1:{port}", [head, other]


@contextmanager
def node(folder: Path, name: str, *options: str) -> Iterator[int]:
    settings = {**RAY, "KVFIX_TEST_REPORT": str(folder / "engine/report"), "PYTHONHASHSEED": "0"}
    environment = clean_environment(PLUGIN, **settings)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=1"]
    command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
    process = started(command, environment, folder / f"{name}.log")
    try:
        yield process.pid
    finally:
        end(process)


def started(command: list[str], environment: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Ray gives a node 30 s, which a busy machine may need twice (ray/_private/node.py 2.60.0:428)."""
    for _ in range(3):
        with open(log_path, "w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if wait_for("Ray runtime started", log_path, process, start.LIMIT):
            return process
        end(process)
        if "timed out during startup" not in log_path.read_text():
            break
    raise AssertionError(log_path.read_text())


def end(process: subprocess.Popen[bytes]) -> None:
    for each in reversed(processes.tree(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    process.wait()


class Served:
    """`ran`; the dumps of the engine and of the second node, made meanwhile; the pids below each node then."""

    def __init__(self, folder: Path) -> None:
        self.dumps: list[dict[str, Any]] = []
        self.below: list[set[int]] = []
        with cluster(folder) as (address, nodes):

            def dump(pid: int) -> None:
                self.below = [{each.pid for each in processes.tree(node)} for node in nodes]
                place = {"KVFIX_DUMP_DIR": str(folder / "engine/dumps")}
                self.dumps = [start.dump(each, folder, **place) for each in (pid, nodes[1])]

            more = {"distributed_executor_backend": "ray", "tensor_parallel_size": RANKS}
            self.ran: Ran = start.run(
                folder / "engine", apply=True, transfer=start.v1(64), rounds=[CROWD, CROWD], mode="check",
                engine={**start.ENGINE, **more}, when=("LMCache hit tokens", dump),
                environment={"RAY_ADDRESS": address, **RAY}, forked=False,
            )  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("ray"))


def workers(served: Served) -> list[dict[str, Any]]:
    return [line for line in served.ran.notes if line["what"] == "connector" and line["role"] == "WORKER"]


def test_it_serves(served: Served) -> None:
    assert served.ran.answer["preemptions"] > 0
    assert served.ran.count("load") > 0
    assert served.ran.answer["rounds"][0] == served.ran.answer["rounds"][1]
    assert "Report: " not in served.ran.log
    assert "a fault of kvfix itself" not in served.ran.log
    assert served.ran.findings() == set()


def test_fixes_reach_every_actor(served: Served) -> None:
    found = workers(served)
    assert len({line["pid"] for line in found}) == RANKS
    pids = {line["pid"] for line in found}
    assert [len(pids & below) for below in served.below] == [1, 1]
    for line in found:
        assert line["choice"] == "check"
        assert {row["code"]: row["verdict"] for row in line["status"]}["KVF013"] == "applied"


def test_the_recorders_of_all_ranks_are_one(served: Served) -> None:
    (found,) = engine_recordings.engines(map(recording.read, served.ran.dumps("signal")))
    assert sorted(found.workers) == list(range(RANKS))
    assert found.missing == []
    assert all(compared.pairs for compared in found.compared.values())
    assert replay.replay(served.ran.dumps("signal"), json=True) == 0


def test_a_dump_of_the_engine_has_the_actors(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not below it. The dump of the other node has what is below that, and the rest by the engine's name."""
    for found in served.dumps:
        rows = {row["pid"]: row for row in found["processes"]}
        ranks = {rank for row in rows.values() for rank in row["ranks"]}
        assert len(ranks) == RANKS + 1, found
        assert {line["pid"] for line in workers(served)} <= set(rows)
    capsys.readouterr()
    assert replay.replay([Path(found["bundle"]) for found in served.dumps], json=True) == 0
    (replayed,) = json.loads(capsys.readouterr().out)
    assert (replayed["missing"], sorted(replayed["ranks"])) == ([], ["0", "1"])
