"""Runs one engine and collects what it answered and what its processes said."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import engines
from kvfix_tools.roundtrip.engines import prompt
from tests.conftest import ROOT, clean_environment

HERE = Path(__file__).parent
#: Seconds for a whole engine; it needs one minute, and two or three beside other work.
LIMIT = 300


#: Six requests of 300 tokens that generate 60, in 32 blocks of 32 tokens: they preempt one another.
CROWD = [(prompt(300, seed), 60) for seed in range(1, 7)]
#: The report in small: the second one is preempted in the middle of its prefill with 288 tokens computed and 256
#: stored, and polled until the first has ended. With LMCache 0.3.10 EngineCore dies of it.
REPORT = [(prompt(411, 11), 20), (prompt(657, 12), 102)]
ENGINE = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 33,
    "max_num_batched_tokens": 352,
    "scheduler_reserve_full_isl": False,
}


#: LMCache in the engine's own processes.
v1 = engines.in_process
#: Cold, then from the cache.
ROUNDS = [REPORT, REPORT, CROWD, CROWD]


@dataclass
class Ran:
    """`answer`: what serve.py wrote; None if the engine died. `said`: the processes' lines. `log`: all output."""

    answer: dict[str, Any] | None
    said: list[dict[str, Any]]
    log: str
    pid: int
    folder: Path

    def dumps(self, reason: str) -> list[Path]:
        """Recorder files that its processes wrote for this reason."""
        return sorted((self.folder / "dumps").rglob(f"kvfix-*-{reason}.jsonl"))

    def processes(self) -> dict[str, dict[str, Any]]:
        """{role of the connector: what its process said of itself}"""
        return {line["role"]: line for line in self.said if line["what"] == "connector"}

    def count(self, what: str) -> int:
        return sum(line["what"] == what for line in self.said)


def run(folder: Path, apply: bool, transfer: dict[str, Any] | None, **more: Any) -> Ran:
    """more: rounds, engine (arguments of LLM), lmcache (folder of a release), spoil_from (round), environment,
    abort (requests `running` and `waiting`, and `extra_args` of the latter), abort_before (round), mode,
    apply_before (round: kvfix.apply() in the program, for an engine that is in it),
    when (a text, and a function of the pid that is called once the text is in the log), standin (False: LMCache's own
    GPU connector, which a machine without a GPU does not have), program (in place of serve.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report"
    job = {
        "apply": more.get("mode", "fix") if apply else None,
        "transfer": transfer,
        "model": str(folder / "model"),
        "out": str(folder / "out.json"),
        "rounds": more.get("rounds", ROUNDS),
        "engine": more.get("engine", ENGINE),
        "spoil": str(folder / "spoil"),
        "spoil_from": more.get("spoil_from"),
        "abort": more.get("abort"),
        "abort_before": more.get("abort_before"),
        "apply_before": more.get("apply_before"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    plugin = HERE / "plugin" if more.get("standin", True) else None
    places = [more.get("lmcache"), plugin, ROOT / "patches", ROOT / "tools"]
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join(str(place) for place in places if place),
        KVFIX_TEST_REPORT=str(report),
        KVFIX_DUMP_DIR=str(folder / "dumps"),
        KVFIX_TEST_SPOIL=str(folder / "spoil"),
        **more.get("environment", {}),
    )

    def when(process: Any) -> None:
        text, do = more["when"]
        engines.wait_for(text, folder / "log", process, LIMIT)
        do(process.pid)

    command = [sys.executable, str(HERE / more.get("program", "serve.py")), str(folder / "job.json")]
    code, text, pid = engines.run(command, environment, folder / "log", LIMIT, when if "when" in more else None)
    assert code is not None, f"the engine did not end in {LIMIT} s: {folder / 'log'}\n{text[-4000:]}"
    said = [json.loads(line) for file in sorted(folder.glob("report.*")) for line in file.read_text().splitlines()]
    out = folder / "out.json"
    return Ran(json.loads(out.read_text()) if out.exists() else None, said, text, pid, folder)
