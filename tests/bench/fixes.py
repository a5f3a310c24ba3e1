"""All fixes on beside none, on the real scheduler: the same healthy schedules in one process, in turn.

A busy machine disturbs a run by more than the fixes cost. So each schedule is played in many short turns, each way
right after the other, the fixes first in every second turn. A turn gives one ratio, of the fastest run each way, and
the median of all ratios counts. It is taken again from the odd and from the even turns alone; how far those two lie
apart is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

#: vLLM's copy stores too little without KVF102: with it there is more to do.
SKIP = {"mp-in-tree": ["KVF102"]}
SCHEDULES, TURNS = 20, 20
CASE = """
import gc, statistics, time, kvfix
from kvfix_tools.lab import runner
runner.prepare({path!r})
with runner.quiet():
    from kvfix_tools.lab.play import play
    from kvfix_tools.lab.schedule import draw
    def choose(fixes):
        kvfix.revert()
        if fixes:
            kvfix.apply(skip={skip!r})
    def once(schedule):
        gc.collect()
        gc.disable()
        start = time.process_time()  # another process on the machine does not count
        done = play(schedule)
        took = time.process_time() - start
        gc.enable()
        return took, done
    def decisions(done):  # what is left behind at the end is what some fixes are there to change
        return [entry for entry in done.log if type(entry[1]).__name__ != "Left"]
    play(draw(0, {connector!r}, plain=True))
    gc.freeze()  # what is imported is not looked through again
    ratios, rates = [], []
    for seed in range({schedules}):
        schedule = draw(seed, {connector!r}, plain=True)
        turns, told = [], {{}}
        for turn in range({turns}):
            took = {{}}
            for fixes in (turn % 2, 1 - turn % 2):
                choose(fixes)
                runs = [once(schedule) for _ in range(4)]
                took[fixes] = min(took for took, _ in runs[1:])  # the first pays for the change
                told.setdefault(fixes, decisions(runs[0][1]))
            turns.append(took[0] / took[1])
        if told[0] == told[1]:  # in others a bug shows, and its fix is there to change it
            ratios.append(turns)
            rates.append(runs[0][1].steps / took[0])
def ratio(turns):
    return statistics.median(each[turn] for each in ratios for turn in turns)
every = range({turns})
apart = abs(ratio(every[::2]) - ratio(every[1::2]))
result = [ratio(every), apart, statistics.median(rates), len(ratios)]
"""


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        known = {"connector": connector, "skip": SKIP.get(connector, []), "schedules": SCHEDULES, "turns": TURNS}
        ratio, spread, rate, played = Fresh(limit=None)(CASE.format(path=str(RELEASES / release), **known))
        beside = f"{rate:.0f} steps/s as released, LMCache {release}; {played} schedules, halves {spread:.1%} apart"
        yield Row(f"scheduler steps with all fixes, {connector}", ratio, "of it", beside, at_least=0.98)
