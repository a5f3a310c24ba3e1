"""Measure kvfix-diagnose: its time on one core, relative to a search in Python for the same needles, and its memory.

- real logs: whole lives of engines, repeated with and without new request ids and times
- a dense log: 60% of its lines are relevant lines of LMCache, each of a new request; a sparse log: 1%
- a stream of 200 MB through standard input

Seconds are processor time without the start of Python. The search in Python reads each line and searches it for the
needles. kvfix also parses the lines and keeps the ledger.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfix_tools.diagnose.grammar import NEEDLES
from tests.bench.engine_logs import FIXTURES, lives
from tests.bench.row import Row
from tests.conftest import clean_environment
from tests.diagnose import lines

MEGABYTES = 48
RELEASE = "0.5.6"
TIME = re.compile(r"\d\d:\d\d:\d\d,\d{3}")
CRASH = Path(lines.__file__).parent / "logs/crash-0.3.10.log.gz"
#: {log: (share of lines that count, times the search in Python at most)}
LOGS = {"dense": (60, 4), "sparse": (1, 0.5)}
#: The same for real logs: repeated lives, and lives with new request ids and times.
REAL = {False: 2.5, True: 4}
GIGABYTES = 0.2
#: What stands between: vLLM's access log and its requests.
OTHERS = [
    '(APIServer pid=7) INFO:     10.0.{0}.7:{1} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    "(APIServer pid=7) INFO 11-21 10:01:02 [logger.py:39] Received request chatcmpl-{0:016x}{1:016x}: params: "
    "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=0.7, "
    "top_p=0.95, top_k=20, max_tokens={1}), lora_request: None.\n",
    "(EngineCore_DP0 pid=276) INFO 11-21 10:01:02 [async_llm.py:321] Added request chatcmpl-{0:016x}{1:016x}.\n",
]
READ = """
import json, re, sys, time
from kvfix_tools.diagnose import log_files, problems
from kvfix_tools.diagnose.diagnosis import Diagnosis
log = Diagnosis()
problems.catalogue()
start = time.process_time()
log_files.read(log, log_files.sources(sys.argv[1:]))
took = time.process_time() - start
log.end()
print(json.dumps({"cpu": took, "bytes": log.bytes, "asked": log.counts["asked"],
                  "codes": [found.rule.code for found in log.findings],
                  # Not getrusage: what the parent had counts there too.
                  "rss": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024}))
"""


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        for what, (share, most) in LOGS.items():
            write(log, share, MEGABYTES)
            found = read(log)
            assert found["codes"] == ["KVD101"]
            yield row(f"{what} log", found, search(log), most)
        for name in FIXTURES:
            for fresh in (False, True):
                with log.open("wb") as file:
                    file.writelines(lives(name, MEGABYTES << 20, fresh))
                found = read(log)
                what = f"lives of {name}{', requests of their own' if fresh else ''}"
                yield row(what, found, search(log), REAL[fresh])
    yield from stream()


def row(what: str, found: dict[str, Any], peer: float, most: float) -> Row:
    megabytes = found["bytes"] / 1e6
    context = f"{megabytes / found['cpu']:.1f} MB/s; in Python {megabytes / peer:.1f} MB/s"
    return Row(what, found["cpu"] / peer, "x a search in Python", context, at_most=most)


def stream() -> Iterator[Row]:
    """Lives of all kinds through standard input."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READ, "-"], env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdin is not None
    with tempfile.NamedTemporaryFile() as log:
        for name in FIXTURES:
            for life in lives(name, int(GIGABYTES * 1e9 / len(FIXTURES)), fresh=True):
                reader.stdin.write(life)
                log.write(life)
        log.flush()
        found = json.loads(reader.communicate()[0])
        peer = search(Path(log.name))
    what = f"{found['bytes'] / 1e9:.1f} GB through standard input"
    yield Row(f"memory for {what}", found["rss"], "MB", "", at_most=200)
    yield row(f"{what}, requests of their own", found, peer, REAL[True])


def read(log: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(log)], env=clean_environment(), capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def search(log: Path) -> float:
    """Return the processor time of a search in Python, in seconds."""
    needles = re.compile(b"|".join(map(re.escape, NEEDLES)))
    start = time.process_time()
    with log.open("rb") as file:
        assert sum(needles.search(line) is not None for line in file)
    return time.process_time() - start


def write(log: Path, share: int, megabytes: int) -> None:
    """A log of about this size, a line each millisecond, with a crash at its end.

    `share` of 100 lines are LMCache's own, three for each request.
    """
    lines = [TIME.sub("TIME", statement(message)) for message in ("asked", "retrieved", "stored")]
    size = number = counted = 0
    with log.open("w") as file:
        while size < megabytes << 20:
            if number * share % 100 < share:
                line = lines[counted % 3].replace("REQUEST", f"chatcmpl-{counted // 3 * 2654435761:032x}")
                seconds, rest = divmod(number, 1000)
                line = line.replace("TIME", f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02},{rest:03}")
                counted += 1
            else:
                line = OTHERS[number % 3].format(number % 250, number % 60_000)
            number += 1
            size += file.write(line)
        file.write(gzip.decompress(CRASH.read_bytes()).decode())


def statement(message: str) -> str:
    """The line of a request that loads all that it hit."""
    which = {"asked": "%d, need to load: %d'", "retrieved": "required tokens", "stored": "offload_time"}[message]
    values = {
        "asked": ("REQUEST", 3000, 64, 2048, 1984),
        "retrieved": ("REQUEST", 2048, 2048, 2048, 0.21, 12.43, 16.56),
        "stored": ("REQUEST", 512, 3000, 0.1, 5.4, 17.5, 4.3, 0.02),
    }[message]
    return lines.logged(RELEASE, message, *values, which=which)
