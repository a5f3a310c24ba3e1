"""All fixes on beside none, on the real scheduler: the same healthy schedules in one process, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

CASE = """
import time, kvfix
from kvfix_tools.lab import runner
runner.prepare({path!r})
from kvfix_tools.lab.play import play
from kvfix_tools.lab.schedule import draw
schedules = [draw(seed, {connector!r}, plain=True) for seed in range(40)]
def once(fixes):
    kvfix.revert()
    if fixes:
        kvfix.apply()
    start = time.process_time()  # another process on the machine does not count
    steps = sum(play(schedule).steps for schedule in schedules)
    return steps / (time.process_time() - start)
with runner.quiet():
    once(False), once(True)
    result = [(once(False), once(True)) for _ in range(15)]
"""


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        pairs = Fresh()(CASE.format(path=str(RELEASES / release), connector=connector))
        ratio = median(fixed / released for released, fixed in pairs)
        rate = median(released for released, _ in pairs)
        beside = f"{rate:.0f} steps/s as released, LMCache {release}"
        yield Row(f"scheduler steps with all fixes, {connector}", ratio, "of it", beside, at_least=0.98)
