"""vLLM sends kvfix's settings to two workers, which are Ray actors on two nodes. kvfix runs in each actor."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import replay
from kvfix_tools.dump import processes
from kvfix_tools.roundtrip.real_engine import free_port, wait_for
from tests.conftest import PLUGIN, clean_environment
from tests.engine import start
from tests.engine.start import CROWD

pytest.importorskip("ray", reason="ray is not installed here: its engine is not run")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANKS = 2
#: Environment of all processes. Without RAY_AUTH_MODE, a token in ~/.ray makes the head node refuse the second node.
RAY = {"KVFIX_TEST_RAY": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the cluster's address and node pids. Retry if a start takes over 30 s (ray/_private/node.py 2.60.0:428)."""
    for _ in range(3):
        with ExitStack() as stack:
            sockets, port = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfix-ray-")), free_port()
            more = [f"--temp-dir={sockets}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
            nodes = [stack.enter_context(node(folder, "head", "--head", f"--port={port}", *more))]
            if nodes[0]:
                nodes.append(stack.enter_context(node(folder, "other", f"--address=127.0.0.1:{port}")))
            if all(nodes):
                yield f"127.0.0.1:{port}", nodes
                return
    raise AssertionError("\n".join(log.read_text() for log in folder.glob("*.log")))


@contextmanager
def node(folder: Path, name: str, *options: str) -> Iterator[int]:
    """Start a node. Yield its pid, or 0 if it does not start."""
    settings = {**RAY, "KVFIX_TEST_REPORT": str(folder / "engine/report"), "PYTHONHASHSEED": "0"}
    environment, log = clean_environment(PLUGIN, **settings), folder / f"{name}.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=1"]
    command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process.pid if wait_for("Ray runtime started", log, process, 120) else 0
    finally:
        for each in reversed(processes.tree(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        process.wait()


def test_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below: list[set[int]] = []
    dumps: list[dict[str, Any]] = []

    def dump(pid: int) -> None:
        below.extend({each.pid for each in processes.tree(node)} for node in nodes)
        place = {"KVFIX_DUMP_DIR": str(tmp_path / "engine/dumps")}
        dumps.extend(start.dump(each, tmp_path, **place) for each in (pid, nodes[1]))

    more = {"distributed_executor_backend": "ray", "tensor_parallel_size": RANKS}
    with cluster(tmp_path) as (address, nodes):
        ran = start.run(
            tmp_path / "engine", apply=True, transfer=start.v1(64), rounds=[CROWD, CROWD], mode="check",
            engine={**start.ENGINE, **more}, when=("LMCache hit tokens", dump),
            environment={"RAY_ADDRESS": address, **RAY}, forked=False,
        )  # fmt: skip
    assert ran.answer["preemptions"] > 0
    assert ran.count("load") > 0
    assert ran.answer["rounds"][0] == ran.answer["rounds"][1]
    workers = [line for line in ran.notes if line["what"] == "connector" and line["role"] == "WORKER"]
    pids = {line["pid"] for line in workers}
    assert len(pids) == RANKS
    assert [len(pids & each) for each in below] == [1, 1]
    for line in workers:
        assert line["choice"] == "check"
        assert {row["code"]: row["verdict"] for row in line["status"]}["KVF013"] == "applied"
    engine = ran.assert_healthy(RANKS)
    assert engine.missing == []
    assert all(compared.pairs for compared in engine.compared.values())
    # Each of the two dumps has the scheduler's process, and the workers below both Ray nodes.
    for found in dumps:
        rows = {row["pid"]: row for row in found["processes"]}
        assert len({rank for row in rows.values() for rank in row["ranks"]}) == RANKS + 1, found
        assert pids <= set(rows)
    capsys.readouterr()
    assert replay.replay([Path(found["bundle"]) for found in dumps], json=True) == 0
    (replayed,) = json.loads(capsys.readouterr().out)
    assert (replayed["missing"], sorted(replayed["ranks"])) == ([], ["0", "1"])
