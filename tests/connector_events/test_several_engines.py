"""kvfix records each engine separately, also in threads, in forks, and with several engines in one process."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvfix
from kvfix.connector_events import recorder
from kvfix.session import session
from kvfix_tools import recording
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late
from tests.conftest import Fresh

SEEDS = (3, 5)


def play_all() -> dict[str, Any]:
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    kvfix.apply("check")
    alone = [Playing(seed).run() for seed in SEEDS]
    # Create the engines one by one, because LMCache has one configuration per process. Then run the engines in threads.
    engines = [Playing(seed) for seed in SEEDS]
    with ThreadPoolExecutor() as pool:
        in_threads = list(pool.map(Playing.run, engines))
    engines = [Playing(seed) for seed in SEEDS]
    while any([each.moves() for each in engines]):  # noqa: C419  each engine makes a step
        assert recorder.scheduler_state() == {}, "with two schedulers the state is ambiguous"
    return {
        "alone": [len(events) for events in alone],
        "threads": in_threads == alone,
        "in turn": [each.run() for each in engines] == alone,
        "forked": forked(alone[0]),
        "logged": [line for line in session.reported if "applied" not in line],
    }


class Playing:
    def __init__(self, seed: int) -> None:
        schedule = draw(seed, "v1", plain=True)
        self._engine = late.LabEngine(schedule.options)
        self._steps = iter(schedule.steps)

    def moves(self) -> bool:
        step = next(self._steps, None)
        if step is not None:
            late.move(self._engine, step)
        return step is not None

    def run(self) -> list[str]:
        """Play the remaining steps. Return the events that kvfix recorded for this engine's scheduler role."""
        while self.moves():
            pass
        self._engine.free_blocks()
        self._engine.budget(self._engine.options.max_num_batched_tokens)
        self._engine.run()
        watched = self._engine.scheduler.connector.__dict__["_kvfix_watched"]
        return [repr(entry.event) for entry in recorder.snapshot() if entry.connector == watched.number]


def forked(alone: list[str]) -> dict[str, Any]:
    """Fork while an engine plays a schedule. The parent continues this engine, and the child plays a second engine."""
    engine = Playing(SEEDS[0])
    assert session.events
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        child: dict[str, Any] = {"begins empty": not session.events, "same": Playing(SEEDS[0]).run() == alone}
        written = recording.read(Path(recorder.write("exit")))
        child |= {
            "only its own": {entry.connector for entry in written.entries} <= set(written.connectors),
            "pid": written.head["pid"] == os.getpid(),
            "ready": bool(list(Path(os.environ["KVFIX_DUMP_DIR"]).rglob(f"kvfix-{os.getpid()}.ready"))),
        }
        os.write(write, json.dumps(child).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return {**json.loads(os.read(read, 1 << 16)), "parent goes on": engine.run() == alone}


def test_each_engine_has_its_own_record(outcomes: dict[str, Any]) -> None:
    assert min(outcomes["alone"]) > 20
    assert outcomes["in turn"]
    assert outcomes["threads"]
    assert all(outcomes["forked"].values()), outcomes["forked"]
    assert [line for line in outcomes["logged"] if " acted: " not in line] == []


COUNT = """
import prometheus_client
from kvfix import metrics
metrics.violated("KVR002")
metrics.violated("KVR002")
metrics.audited(3)
result = None
"""
ANSWER = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
result = prometheus_client.generate_latest(registry).decode()
"""


def test_counts_of_all_processes_are_merged(fresh: Fresh, tmp_path: Path) -> None:
    for _ in range(2):
        fresh(COUNT, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    found = fresh(ANSWER, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'kvfix_violations_total{rule="KVR002"} 4.0' in found
    assert "kvfix_audited_chunks_total 6.0" in found
