"""`kvfix look` at an engine under load that was started without kvfix: 1,000 looks, one a second.

Seconds with looks and without take turns, on one engine, so they share the state of the machine. No look may find
anything wrong, and every round of the same requests has the same answers. Forty minutes on two cores: one is the
engine's, with one thread for its kernels, the other one the looker's. An engine whose kernels take all cores pays for
what a look costs outside of it too, which is a row of its own.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import geometric_mean, mean, quantiles, stdev

from kvfix.ledger.standstill import Look, verdicts
from kvfix_tools.look import looking
from tests.bench.row import Row
from tests.engine import start

LOOKS = 1000
#: Seconds between two looks, and of a turn.
PAUSE, TURN = 1.0, 10.0
#: The engine's core, and the looker's.
ENGINE, LOOKER = 0, 1
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(ENGINE)}
_ROUND = re.compile(r"calm round \d+ after ([\d.]+) s, at ([\d.]+)")


def measure() -> Iterator[Row]:
    looks: list[Look] = []
    turns: list[tuple[float, bool]] = []  # its begin, and whether it has looks
    outside: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as place, start.server() as transfer:
        folder = Path(place)

        def do(pid: int) -> None:
            try:
                tree = looking.engine_of(pid)
                for process in tree:
                    for thread in Path(f"/proc/{process.pid}/task").iterdir():
                        os.sched_setaffinity(int(thread.name), {ENGINE})
                os.sched_setaffinity(0, {LOOKER})
                looker = looking.Looker(tree, full=False)
                outside.append(_seconds())
                while len(looks) < LOOKS:
                    turns.append((time.monotonic(), not (turns and turns[-1][1])))
                    end = turns[-1][0] + TURN
                    while (now := time.monotonic()) < end:
                        if turns[-1][1]:
                            looks.append(looker.look())
                        time.sleep(max(0.0, min(end, now + PAUSE) - time.monotonic()))
                outside.append(_seconds())
            finally:
                (folder / "stop").touch()

        ran = start.run(
            folder, False, transfer, engine=start.TWO_PROCESSES, program="attached.py", forked=False,
            when=("calm round 3 ", do), calm=start.CROWD[:2], hard=[], flags=str(folder), limit=4 * LOOKS,
            environment=_ONE_THREAD,
        )  # fmt: skip
        assert ran.answer is not None, ran.log[-3000:]
        answers = [answer for _, answer in ran.answer["rounds"]]
        assert all(each == answers[0] for each in answers)
        wrong = [found for first, second in pairwise(looks) for found in verdicts([first, second])]
        assert not wrong, wrong[:3]
    took = [sum(each.get("milliseconds", 0.0) for each in look.processes) for look in looks]
    yield Row("a look, of all main threads", mean(took), "ms", f"{quantiles(took, n=100)[98]:.1f} ms in one of 100", 5)
    seconds = TURN * sum(with_looks for _, with_looks in turns)
    own = 100 * sum(took) / 1000 / seconds
    yield Row(f"{LOOKS} looks, their time", own, "%", f"{seconds:.0f} s with looks", 1)
    yield Row("a look, outside of the engine", 1000 * (outside[1] - outside[0]) / LOOKS, "ms of a core", "", 50)
    ratios = list(_ratios(turns, [(float(at), float(of)) for of, at in _ROUND.findall(ran.log)]))
    error = 2 * stdev(ratios) / sqrt(len(ratios))
    beside = f"{len(answers)} rounds, {len(ratios)} turns, +- {error:.3f}"
    yield Row("rounds a second with looks", geometric_mean(ratios), "of those without", beside, at_least=0.99 - error)


def _seconds() -> float:
    """Of processors, that the looker and its ended children have taken."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _ratios(turns: list[tuple[float, bool]], rounds: list[tuple[float, float]]) -> Iterator[float]:
    """Of each turn with looks and the one after it: how long a round took without, by how long with."""
    means = []
    for begin, _ in turns:
        own = [of for at, of in rounds if begin <= at - of and at <= begin + TURN]
        means.append(mean(own) if own else 0.0)
    for number in range(0, len(turns) - 1, 2):
        if means[number] and means[number + 1]:
            yield means[number + 1] / means[number]
