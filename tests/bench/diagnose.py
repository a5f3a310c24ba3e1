"""Measure memory and processor time of kvfix-diagnose. The bench divides the time by the time of a search in Python.

A "life" is the log of an engine from start to end. kvfix-diagnose reads lives, a sparse log and a stream of 200 MB. In
the sparse log, 99 of 100 lines mean nothing to kvfix-diagnose. The time does not include Python's start.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvfix_tools.diagnose.grammar import NEEDLES
from tests.bench import Row
from tests.conftest import clean_environment
from tests.diagnose.lines import real

FIXTURES = ("healthy-0.5.6", "crash-0.3.10", "mp-0.5.6", "degraded-0.5.6")
#: Matches a request id, or a time of LMCache's logger. Each life gets new ids and times.
OWN = re.compile(rb"(\b\d+-[0-9a-f]{8}\b(?!-)|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
MEGABYTES = 48
ROUNDS = 5
#: Maximum time for lives (REAL) and the sparse log (SPARSE). The unit is the time of a search for NEEDLES in Python.
REAL, SPARSE = 4, 0.5
GIGABYTES = 0.2
#: Lines of vLLM's access log and request log. These lines mean nothing to kvfix-diagnose.
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
print(json.dumps({"cpu": took, "bytes": log.bytes,
                  "codes": [found.rule.code for found in log.findings],
                  # Do not use getrusage(): its maximum also counts memory of the parent.
                  "rss": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024}))
"""


def measure() -> Iterator[Row]:
    logs = {"sparse log": (sparse(), SPARSE)}
    for name in FIXTURES:
        logs[f"lives of {name}"] = (lives(name, MEGABYTES << 20), REAL)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for what, (blocks, most) in logs.items():
            with log.open("wb") as file:
                file.writelines(blocks)
            # Another program on the host can only slow a run down, so the fastest run counts.
            runs = [(read(log), search(log)) for _ in range(ROUNDS)]
            found = min((found for found, _ in runs), key=itemgetter("cpu"))
            assert ("KVD101" in found["codes"]) == ("crash" in what)
            yield row(what, found, min(peer for _, peer in runs), most)
    yield from stream()


def sparse() -> Iterator[bytes]:
    """Yield each line of an engine after 99 lines from OTHERS. The 99 lines have as many bytes as 75 engine lines."""
    for life in lives("healthy-0.5.6", (MEGABYTES << 20) // 75):
        for number, line in enumerate(life.splitlines(keepends=True)):
            for other in range(99 * number, 99 * number + 99):
                yield OTHERS[other % 3].format(other % 250, other).encode()
            yield line


def row(what: str, found: dict[str, Any], peer: float, most: float) -> Row:
    megabytes = found["bytes"] / 1e6
    context = f"{megabytes / found['cpu']:.1f} MB/s; in Python {megabytes / peer:.1f} MB/s"
    return Row(what, found["cpu"] / peer, "x a search in Python", context, at_most=most)


def stream() -> Iterator[Row]:
    with tempfile.NamedTemporaryFile() as log:
        for name in FIXTURES:
            log.writelines(lives(name, int(GIGABYTES * 1e9 / len(FIXTURES))))
        log.seek(0)
        found, peer = read("-", log), search(Path(log.name))
    what = f"{found['bytes'] / 1e9:.1f} GB through standard input"
    yield Row(f"memory for {what}", found["rss"], "MB", "", at_most=200)
    yield row(what, found, peer, REAL)


def read(log: Path | str, stdin: Any = None) -> dict[str, Any]:
    command = [sys.executable, "-c", READ, str(log)]
    done = subprocess.run(command, env=clean_environment(), stdin=stdin, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def search(log: Path) -> float:
    """Return the processor time of a search for NEEDLES in Python, in seconds."""
    needles = re.compile(b"|".join(map(re.escape, NEEDLES)))
    start = time.process_time()
    with log.open("rb") as file:
        assert sum(needles.search(line) is not None for line in file)
    return time.process_time() - start


def lives(name: str, size: int, first: int = 0) -> Iterator[bytes]:
    """Yield about `size` bytes of lives with new request ids and times. first: number of the first life."""
    life = real(name)
    parts = OWN.split(life)
    for number in range(first, first + max(1, size // len(life))):
        own = {part: _in_life(part, number) for part in set(parts[1::2])}
        yield b"".join(own[part] if at % 2 else part for at, part in enumerate(parts))


def _in_life(part: bytes, number: int) -> bytes:
    if b":" in part:
        return str(datetime.fromisoformat(part.decode()) + number * timedelta(minutes=2)).encode()
    count, _, name = part.partition(b"-")
    return b"%d-%08x" % (int(count) + 100 * number, (int(name, 16) + number * 2654435761) % (1 << 32))
