"""Measure 1000 looks of `kvfix look`, one per second, at a busy engine that was started without kvfix.

No look may find a problem. The engine repeats the same requests, and must give equal answers. The engine and `kvfix
look` have one core each, and the engine has one thread for kernels. The bench measures how long a look stops a thread
of the engine, and subtracts the time in which the thread or `kvfix look` waits for a core. If the processor time of
`kvfix look` is longer than the result, the bench takes the processor time. The bench also measures the code that
`kvfix look` runs in the engine's main thread.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvfix.ledger.standstill import Look, verdicts
from kvfix_tools.look import inject, looking, ptrace
from tests.bench import Row
from tests.engine import start

LOOKS = 1000
PAUSE = 1.0  # seconds between two looks
ENGINE, LOOKER = 0, 1  # the engine's core and the looker's core
#: The engine runs this code. The code runs the injected program, and writes the program's processor time to a file.
_TIMED = """
import time
began = time.thread_time()
exec(compile({whole!r}, "<kvfix>", "exec"), {{}})
with open({file!r}, "a") as file:
    file.write(f"{{time.thread_time() - began}}\\n")
"""


def _timed_stop(file: Path) -> Callable[..., Any]:
    """Return a replacement of `ptrace._performed` that writes the time of each stop to the file."""
    performed = ptrace._performed

    def timed(thread: int, *work: Any) -> Any:
        threads = (thread, os.getpid())
        began, waited, used = time.perf_counter(), _waited(threads), time.process_time()
        answer = performed(thread, *work)
        used, took = time.process_time() - used, time.perf_counter() - began - (_waited(threads) - waited)
        with file.open("a") as opened:
            opened.write(f"{max(used, took)}\n")
        return answer

    return timed


def _waited(threads: Iterable[int]) -> float:
    return sum(int(Path(f"/proc/{each}/schedstat").read_text().split()[1]) for each in threads) / 1e9


def measure() -> Iterator[Row]:
    looks: list[Look] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as place, start.server() as transfer:
        folder = Path(place)
        stopped, run = folder / "stopped", folder / "run"

        def do(pid: int) -> None:
            try:
                tree = looking.engine_of(pid)
                for process in tree:
                    for thread in Path(f"/proc/{process.pid}/task").iterdir():
                        os.sched_setaffinity(int(thread.name), {ENGINE})
                os.sched_setaffinity(0, {LOOKER})
                looker = looking.Looker(tree, full=False)
                looker.look()  # the first look imports kvfix's modules in the engine
                for file in (stopped, run):
                    file.write_text("")
                seconds.append(time.monotonic())
                while len(looks) < LOOKS:
                    now = time.monotonic()
                    looks.append(looker.look())
                    time.sleep(max(0.0, now + PAUSE - time.monotonic()))
                seconds.append(time.monotonic())
            finally:
                (folder / "stop").touch()

        code = inject._CODE
        timed = SimpleNamespace(format=lambda **names: _TIMED.format(whole=code.format(**names), file=str(run)))
        with mock.patch.object(ptrace, "_performed", _timed_stop(stopped)), mock.patch.object(inject, "_CODE", timed):
            ran = start.run(
                folder, False, transfer, forked=False,
                when=("calm round 3 ", do), calm=start.CROWD[:2], hard=[], flags=str(folder), limit=2 * LOOKS + 300,
                environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(ENGINE)},
            )  # fmt: skip
        stops, runs = ([float(line) for line in file.read_text().split()] for file in (stopped, run))
        answers = [answer for _, answer in ran.answer["rounds"]]
        assert all(each == answers[0] for each in answers)
        wrong = [found for first, second in pairwise(looks) for found in verdicts([first, second])]
        assert not wrong, wrong[:3]
    took = [sum(each.get("milliseconds", 0.0) for each in look.processes) for look in looks]
    yield Row("collecting state in a look", mean(took), "ms", f"99th percentile {quantiles(took, n=100)[98]:.1f} ms", 5)
    longest = 1000 * quantiles(stops, n=100)[98]
    context = f"{len(stops)} stops, median {1000 * median(stops):.2f} ms, 99th percentile {longest:.1f} ms"
    yield Row("a stop of a thread", 1000 * mean(stops), "ms", context, 2)
    whole = seconds[1] - seconds[0]
    shares = [100 * sum(each) / whole for each in (stops, runs)]
    context = f"of {whole:.0f} s: stopped {shares[0]:.3f} %, injected code ran {shares[1]:.3f} % ({len(runs)} runs)"
    yield Row("time that looks stop the engine or run in it", sum(shares), "%", context, 1)
