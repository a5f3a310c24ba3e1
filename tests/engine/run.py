"""Runs one engine and collects what it answered and what its processes said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, clean_environment

HERE = Path(__file__).parent
#: Seconds for a whole engine; it needs one minute, and two or three beside other work.
LIMIT = 300


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


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


def v1(chunk_size: int, **more: Any) -> dict[str, Any]:
    """LMCache in the engine's own processes. more: its settings."""
    settings = {
        "chunk_size": chunk_size,
        "local_cpu": True,
        "max_local_cpu_size": 0.2,
        "save_unfull_chunk": False,
        # The default hashes None, whose hash is an address on Python 3.11: scheduler and worker would never agree.
        "pre_caching_hash_algorithm": "sha256_cbor",
        **more,
    }
    extra = {f"lmcache.{name}": value for name, value in settings.items()}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


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
        return sorted((self.folder / "dumps").glob(f"kvfix-*-{reason}.jsonl"))

    def processes(self) -> dict[str, dict[str, Any]]:
        """{role of the connector: what its process said of itself}"""
        return {line["role"]: line for line in self.said if line["what"] == "connector"}

    def count(self, what: str) -> int:
        return sum(line["what"] == what for line in self.said)


def wait_for(text: str, log: Path, process: subprocess.Popen[Any]) -> None:
    """Until the text is in the log, or the process has ended."""
    until = time.monotonic() + LIMIT
    while text not in log.read_text(errors="replace") and process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)


def run(folder: Path, apply: bool, transfer: dict[str, Any] | None, **more: Any) -> Ran:
    """more: rounds, engine (arguments of LLM), lmcache (folder of a release), spoil_from (round), environment,
    abort (requests `running` and `waiting`, and `extra_args` of the latter), abort_before (round), mode,
    when (a text, and a function of the pid that is called once the text is in the log), standin (False: LMCache's own
    GPU connector, which a machine without a GPU does not have)."""
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
    }
    (folder / "job.json").write_text(json.dumps(job))
    plugin = HERE / "plugin" if more.get("standin", True) else None
    places = [more.get("lmcache"), plugin, ROOT / "patches", ROOT / "tools"]
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join(str(place) for place in places if place),
        PYTHONHASHSEED="0",
        KVFIX_TEST_REPORT=str(report),
        KVFIX_DUMP_DIR=str(folder / "dumps"),
        KVFIX_TEST_SPOIL=str(folder / "spoil"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_DISABLE_BANNER="1",
        **more.get("environment", {}),
    )
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "serve.py"), str(folder / "job.json")],
            env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
        )  # fmt: skip
        hung = False
        try:
            if "when" in more:
                text, do = more["when"]
                wait_for(text, folder / "log", process)
                do(process.pid)
            process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            hung = True
        finally:  # an engine that failed to start leaves its EngineCore behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        text = log.read()
    assert not hung, f"the engine did not end in {LIMIT} s: {folder / 'log'}\n{text[-4000:]}"
    said = [json.loads(line) for file in sorted(folder.glob("report.*")) for line in file.read_text().splitlines()]
    out = folder / "out.json"
    return Ran(json.loads(out.read_text()) if out.exists() else None, said, text, process.pid, folder)
