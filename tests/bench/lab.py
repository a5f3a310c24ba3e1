"""Measure the time and memory that `kvfix lab fuzz` needs to play random schedules, and to shrink a schedule.

The lab runs with all checks, on one core. Imports do not count. The bench divides the lab's time by the time of vLLM's
scheduler and LMCache's connector for the same steps. The bench divides the time of a shrink by the time of one play.
"""

from collections.abc import Iterator

from tests.bench import Row
from tests.conftest import RELEASES, Fresh

SCHEDULES = 200
SPEED = """
import gc, time
from unittest import mock
from kvfix_tools.lab import runner
from tests.engine.plugin.kvfix_engine_times import Spent, timed
runner.prepare({path!r})
with runner.quiet():
    from vllm.v1.core.sched.scheduler import Scheduler
    from kvfix_tools.lab import releases
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import draw
gc.freeze()  # as the command does
spent = Spent()
def measured(seeds):
    schedules = [draw(seed, {connector!r}, lacks=known) for seed in seeds]
    spent.seconds = 0.0
    start = time.process_time()
    steps = sum(play(each).steps for each in schedules)
    seconds = time.process_time() - start
    return [steps / seconds, seconds / spent.seconds]
names = "schedule", "update_from_output", "add_request", "finish_requests"
patched = mock.patch.multiple(Scheduler, **{{name: timed(vars(Scheduler)[name], spent) for name in names}})
with runner.applied(False), patched:
    known = releases.lacking()
    measured(range(10**6, 10**6 + 10))
    result = measured(range({schedules}))
"""
#: The bench measures memory after each of these numbers of steps. The first steps fill caches and the allocator.
FEW, MANY = 10_000, 40_000
#: This code measures memory. As in the nightly run, the lab plays with the fixes in mode `check`.
MEMORY = """
import gc, math, os
from kvfix_tools.lab import runner
runner.prepare({path!r})
with runner.quiet():
    from kvfix_tools.lab.fuzz.fuzz_run import Run, fuzz
gc.freeze()
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
result, first = [], 0
for steps in ({few}, {many} - {few}):
    done = fuzz(Run({connector!r}, True, mode="check"), range(first, first + 10**6), math.inf, shrinking=0, most=steps)
    assert done.steps >= steps and not done.violations
    first += done.seeds
    result.append((resident(), done.steps / done.seconds))
"""
SHRINK = """
import time
from kvfix_tools.lab import runner
runner.prepare({path!r})
from kvfix_tools.lab.fuzz.fuzz_run import Run, fuzz
with runner.quiet():
    from kvfix_tools.lab.fuzz.fuzz import play, shrink, signature
    result = []
    violations = fuzz(Run({connector!r}, False), range(60), 600, shrinking=0).violations
    for found in {{each.rule: each for each in violations}}.values():  # one of each rule: a shrink takes minutes
        start = time.process_time()
        played = play(found.schedule)
        once, start = time.process_time() - start, time.process_time()
        wanted = next(signature(each) for each in played.violations if each.code == found.rule)
        short = shrink(found.schedule, wanted, 120)
        result.append([time.process_time() - start, once, len(found.schedule.steps), len(short.steps)])
"""


def measure() -> Iterator[Row]:
    fresh, path = Fresh(limit=None), str(RELEASES / "0.5.6")
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        rate, times = fresh(SPEED.format(path=str(RELEASES / release), connector=connector, schedules=SCHEDULES))
        yield Row(f"lab fuzz, {connector}", times, "x the scheduler's time", f"{rate:.0f} steps/s", at_most=3.5)
    for connector in ("v1", "mp"):
        (before, _), (after, rate) = fresh(MEMORY.format(path=path, connector=connector, few=FEW, many=MANY))
        context = f"{before:.0f} MiB after {FEW}; {rate:.0f} steps/s in check"
        yield Row(f"lab fuzz, {connector}, memory after {MANY} steps", after - before, "MiB more", context, at_most=10)
    for connector in ("v1", "mp"):
        took = fresh(SHRINK.format(path=path, connector=connector))
        longest, once, steps, short = max(took)
        context = f"{longest:.0f} s; {len(took)} violations; from {steps} steps to {short}"
        yield Row(f"lab shrink, the longest, {connector}", longest / once, "x one play", context, at_most=250)
