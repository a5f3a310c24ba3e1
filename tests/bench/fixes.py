"""All fixes on beside none, on the real scheduler: the same healthy schedules in one process, in turn."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

#: vLLM's copy stores too little without KVF102: with it there is more to do.
SKIP = {"mp-in-tree": ["KVF102"]}
CASE = """
import gc, time, kvfix
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
        start = time.process_time()  # another process on the machine does not count
        done = play(schedule)
        return time.process_time() - start, len(done.log), done.steps
    took, steps = [0.0, 0.0], 0
    for seed in range(40):
        schedule = draw(seed, {connector!r}, plain=True)
        runs = [[], []]
        for _ in range(3):
            for fixes in (0, 1):
                choose(fixes)
                runs[fixes] += [once(schedule) for _ in range(4)]  # the first pays for the change
            gc.collect()
        if runs[0][0][1:] != runs[1][0][1:]:
            continue  # a bug shows in this one, and its fix is there to change it
        for fixes in (0, 1):
            took[fixes] += min(runs[fixes])[0]  # what disturbs a run only makes it longer
        steps += runs[0][0][2]
result = [took[0] / took[1], steps / took[0]]
"""


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        case = CASE.format(path=str(RELEASES / release), connector=connector, skip=SKIP.get(connector, []))
        ratio, rate = Fresh()(case)
        beside = f"{rate:.0f} steps/s as released, LMCache {release}"
        yield Row(f"scheduler steps with all fixes, {connector}", ratio, "of it", beside, at_least=0.98)
