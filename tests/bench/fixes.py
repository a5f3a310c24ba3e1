"""All fixes on beside none, on the real scheduler: the same healthy schedules in one process, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

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
    def once(schedule, fixes):
        kvfix.revert()
        if fixes:
            kvfix.apply(skip={skip!r})
        start = time.process_time()  # another process on the machine does not count
        done = play(schedule)
        return time.process_time() - start, len(done.log), done.steps
    schedules = [draw(seed, {connector!r}, plain=True) for seed in range(60)]
    same = [each for each in schedules if once(each, False)[1:] == once(each, True)[1:]]
    gc.collect()
    gc.freeze()
    gc.disable()
    rounds = []
    for number in range(12):
        took, steps = [0.0, 0.0], 0
        for place, schedule in enumerate(same):
            for fixes in (0, 1) if (place + number) % 2 else (1, 0):  # who goes first takes turns
                seconds, _, made = once(schedule, fixes)
                took[fixes] += seconds
                steps += made
        rounds.append((took[0] / took[1], steps / 2 / took[0]))
        gc.collect()
result = rounds
"""


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        case = CASE.format(path=str(RELEASES / release), connector=connector, skip=SKIP.get(connector, []))
        rounds = Fresh()(case)
        ratio = median(ratio for ratio, _ in rounds)
        rate = median(rate for _, rate in rounds)
        beside = f"{rate:.0f} steps/s as released, LMCache {release}"
        yield Row(f"scheduler steps with all fixes, {connector}", ratio, "of it", beside, at_least=0.98)
