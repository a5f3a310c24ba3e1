"""Start a real engine or a real `lmcache server`. Collect the log, notes and files of an engine (class Ran)."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import engine_recordings, recording, replay
from kvfix_tools.diagnose.diagnosis import diagnosed
from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.real_engine import prompt
from tests.conftest import PLUGIN, clean_environment
from tests.fork_server import FORK_WORKERS, Forked

HERE = Path(__file__).parent
#: Maximum seconds for a run of an engine. A run takes one minute, or at most three minutes while other engines run.
LIMIT = 300
#: Marks slow tests (five minutes in all). The lab's engine or another test case checks the same behaviour.
LONG = pytest.mark.skipif(
    "KVFIX_TEST_LONG" not in os.environ, reason="the lab's engine shows this too. KVFIX_TEST_LONG=1 runs a real engine"
)
#: Six requests with 300 prompt tokens and 60 generated tokens. 32 blocks of 32 tokens are too few, so vLLM preempts.
CROWD = [(prompt(300, seed), 60) for seed in range(1, 7)]
#: A small version of LMCache issue 2158. vLLM preempts the second request with 288 tokens computed and 256 stored.
REPORT = [(prompt(411, 11), 20), (prompt(657, 12), 102)]
ENGINE = {
    "max_model_len": 1024, "num_gpu_blocks_override": 33, "max_num_batched_tokens": 352,
    "scheduler_reserve_full_isl": False,
}  # fmt: skip
#: Run scheduler and worker in the program's own process. Then Python imports vLLM once instead of three times.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
v1 = real_engine.in_process
#: Each set of requests runs twice. vLLM computes the KV in the first round, and loads the KV in the second round.
ROUNDS = [REPORT, REPORT, CROWD, CROWD]


@dataclass
class Ran:
    written: dict[str, Any] | None  # the program's answer; None if the engine died
    notes: list[dict[str, Any]]  # lines that the test suite's plugin wrote in the engine's processes
    log: str  # all output
    pid: int
    folder: Path

    @property
    def answer(self) -> dict[str, Any]:
        assert self.written is not None, self.log[-3000:]
        return self.written

    def dumps(self, reason: str) -> list[Path]:
        return sorted((self.folder / "dumps").rglob(f"kvfix-*-{reason}.jsonl"))

    def processes(self) -> dict[str, dict[str, Any]]:
        return {note["role"]: note for note in self.notes if note["what"] == "connector"}

    def findings(self) -> set[str]:
        return {found.rule.code for found in diagnosed(self.log.encode()).findings if not found.is_note}

    def count(self, what: str) -> int:
        return sum(note["what"] == what for note in self.notes)

    def assert_healthy(self, ranks: int = 1) -> engine_recordings.Engine:
        """Assert that there is no violation, finding or kvfix error. Return the recording of the engine's ranks."""
        assert "Report: " not in self.log
        assert "a fault of kvfix itself" not in self.log
        assert self.findings() == set()
        assert replay.replay(self.dumps("signal"), json=True) == 0
        (engine,) = engine_recordings.engines(map(recording.read, self.dumps("signal")))
        assert engine.scheduler is not None
        assert sorted(engine.workers) == list(range(ranks))
        return engine


def run(
    folder: Path, apply: bool, transfer: dict[str, Any] | None, *, mode: str = "fix", rounds: list[Any] = ROUNDS,
    engine: dict[str, Any] = ENGINE, environment: dict[str, str] | None = None, lmcache: Path | None = None,
    program: str = "serve.py", forked: bool = True, when: tuple[str, Callable[[int], None]] | None = None,
    limit: int = LIMIT, **more: Any,
) -> Ran:  # fmt: skip
    """Run an engine, and return the engine's results. engine: arguments of vLLM's LLM. more: fields of serve.py's job.

    - forked: fork a process that has imported vLLM. False: start a new process, as a user does
    - when: (text, function). When the log has the text, call the function with the pid of the program
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = clean_environment(
        *([lmcache] if lmcache else []), PLUGIN,
        **{"KVFIX_TEST_REPORT": str(folder / "report"), "KVFIX_DUMP_DIR": str(folder / "dumps")},
        **{"KVFIX_TEST_SPOIL": str(folder / "spoil"), FORK_WORKERS: "", **(environment or {})},
    )  # fmt: skip
    job = {"apply": mode if apply else None, "transfer": transfer, "rounds": rounds, "before": {}, "engine": engine}

    def while_it_runs(process: Any) -> None:
        if when is not None:
            text, do = when
            real_engine.wait_for(text, folder / "log", process, limit)
            do(process.pid)

    popen: Any = Forked if forked else subprocess.Popen
    ended = real_engine.run([str(HERE / program)], {**job, **more}, folder, settings, limit, while_it_runs, popen)
    assert ended.code is not None, f"the engine did not end in {limit} s: {folder / 'log'}\n{ended.log[-4000:]}"
    notes = [json.loads(line) for file in sorted(folder.glob("report.*")) for line in file.read_text().splitlines()]
    return Ran(ended.answer, notes, ended.log, ended.pid, folder)


def dump(pid: int, folder: Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvfix_tools.cli", "dump", str(pid), "-o", str(folder), "--json"]
    done = subprocess.run(command, env=clean_environment(**environment), capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"error": done.stderr}


@contextmanager
def server(
    lmcache: Path | None = None, options: tuple[str, ...] = (), log: Path | None = None, **settings: str
) -> Iterator[dict[str, Any]]:
    """Start `lmcache server` with `kvfix run`. lmcache: folder of LMCache 0.4.6, or None for the newest LMCache."""
    start = (sys.executable, "-m", "kvfix_tools.cli", "run", "--")
    environment = clean_environment(*([lmcache] if lmcache else []), **settings)
    transfer_mode = ("--transfer-mode", "non_gpu") if lmcache else real_engine.ANY_MODE
    with (
        tempfile.TemporaryDirectory() as folder,
        real_engine.server(log or Path(folder) / "log", 64, environment, start, (*transfer_mode, *options)) as transfer,
    ):
        yield transfer
