"""kvfix-diagnose beside `grep -c` with the same needles and `lnav -n`, on the same logs, in one run.

A dense log: 60% of its lines are LMCache's own and count; a sparse one: 1%. Megabytes by seconds of processor time, so
that other work on the machine does not count; starting Python (or lnav) is left out. The needles are searched for by
grep alone; kvfix reads the lines, and keeps the ledger.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfix_tools.diagnose import grammar, lnav
from tests.bench.row import Row
from tests.conftest import clean_environment
from tests.diagnose import releases

MEGABYTES = 96
RELEASE = "0.5.6"
TIME = re.compile(r"\d\d:\d\d:\d\d,\d{3}")
CRASH = Path(releases.__file__).parent / "logs/crash-0.3.10.log.gz"
#: (share of lines that count, MB/s a core with the standard library, with hyperscan)
LOGS = {"dense": (60, 40, 80), "sparse": (1, 120, 400)}
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
from kvfix_tools.diagnose import reader, report, work
from kvfix_tools.diagnose.case import Case
case = Case()
sources = reader.sources(sys.argv[2:])
start, wall = time.process_time(), time.perf_counter()
work.read(case, sources, int(sys.argv[1]))
took, wall = time.process_time() - start, time.perf_counter() - wall
case.end()
print(json.dumps({"cpu": took, "wall": wall, "counts": case.counts, "bytes": case.bytes,
                  "report": report.as_json(case, case.findings),
                  # Not getrusage: what the parent had counts there too.
                  "rss": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024}))
"""


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for name, (share, plain, fast) in LOGS.items():
            log = folder / f"{name}.log"
            write(log, share, MEGABYTES)
            yield from one_core(name, log, plain, fast)
        yield from all_cores(folder)
        yield from memory(folder)


def one_core(name: str, log: Path, plain: int, fast: int) -> Iterator[Row]:
    megabytes = log.stat().st_size / 1e6
    peers = f"grep -c {megabytes / grep(log):.0f} MB/s"
    peers += f", lnav -n {megabytes / with_lnav(log):.0f} MB/s" if shutil.which("lnav") else ", lnav is not installed"
    # The better of two: what else runs on the machine takes from the caches.
    found, again = read([log], fast=False), read([log], fast=False)
    assert found["report"] == again["report"]
    rate = megabytes / min(found["cpu"], again["cpu"])
    yield Row(f"{name} log, standard library", rate, "MB/s a core", peers, at_least=plain)
    if importlib.util.find_spec("hyperscan") is None:
        print("hyperscan (kvfix[fast]) is not installed: not measured", file=sys.stderr)
        return
    same, again = read([log], fast=True), read([log], fast=True)
    assert same["report"] == again["report"] == found["report"], "hyperscan finds other lines"
    yield Row(f"{name} log, hyperscan", megabytes / min(same["cpu"], again["cpu"]), "MB/s a core", peers, at_least=fast)


def all_cores(folder: Path) -> Iterator[Row]:
    """Chunks of one file, and several files, by one process and by as many as there are cores: the same report."""
    cores = os.cpu_count() or 1
    if cores == 1:
        print("one core: what more of them gain is not measured", file=sys.stderr)
        return
    parts = []
    for number in range(4):
        parts.append(folder / f"part{number}.log")
        write(parts[-1], 60, MEGABYTES // 4, first=number * 1_000_000)
    for what, logs, most in (
        ("dense log", [folder / "dense.log"], 0.9),
        ("sparse log", [folder / "sparse.log"], 0.8),
        # Their lines alternate by the millisecond, the worst there is: one process puts them in order.
        ("4 dense files", parts, 1.0),
    ):
        one, many = read(logs, fast=False), read(logs, fast=False, jobs=cores)
        assert one["report"] == many["report"], f"{what}: {cores} processes find other things than one"
        megabytes = sum(log.stat().st_size for log in logs) / 1e6
        beside = f"{megabytes / one['wall']:.0f} MB/s with one process, {megabytes / many['wall']:.0f} with {cores}"
        yield Row(f"{what}, {cores} cores, time beside one", many["wall"] / one["wall"], "of it", beside, at_most=most)


def memory(folder: Path) -> Iterator[Row]:
    """Ten times the log and the requests, and the same memory."""
    small, large = folder / "small.log", folder / "large.log"
    write(small, 60, 60)
    write(large, 60, 600)
    few, many = read([small], fast=False), read([large], fast=False)
    beside = f"{few['rss']:.0f} MB for {few['bytes'] / 1e6:.0f} MB, {few['counts']['asked']} requests"
    what = f"memory for {many['bytes'] / 1e6:.0f} MB with {many['counts']['asked']} requests"
    yield Row(what, many["rss"], "MB", beside, at_most=200)


def read(logs: list[Path], fast: bool, jobs: int = 1) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(jobs), *map(str, logs)],
        env=clean_environment(KVFIX_DIAGNOSE_FAST="1" if fast else "0"),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def grep(log: Path) -> float:
    needles = [word for needle in grammar.NEEDLES for word in ("-e", needle.decode())]
    return cpu(["grep", "-c", "-F", *needles, str(log)])


def with_lnav(log: Path) -> float:
    """Reading alone, with the format that knows LMCache's lines; that of an empty file is subtracted."""
    form, empty = log.with_name("kvfix.lnav.json"), log.with_name("empty.log")
    form.write_text(json.dumps(lnav.format_file()))
    empty.write_text("nothing\n")
    command = ["lnav", "-n", "-c", ":quit"]
    environment = {"HOME": str(log.parent), "TERM": "dumb"}
    cpu(["lnav", "-i", str(form)], environment)
    return max(0.01, cpu([*command, str(log)], environment) - cpu([*command, str(empty)], environment))


def cpu(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Seconds of processor time of this command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write(log: Path, share: int, megabytes: int, first: int = 0) -> None:
    """A log of about this size, a line each millisecond, with a crash at its end.

    `share` of 100 lines are LMCache's own, three for each request.
    """
    lines = [TIME.sub("TIME", statement(message)) for message in ("asked", "retrieved", "stored")]
    size, number, counted = 0, 0, first
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
    import ast

    place = next(place for place in releases.places(RELEASE, message) if which in ast.unparse(place.text))
    return releases.line(place, *values)[0]
