"""The lab with all oracles on, one core, after imports: its speed, its memory, and how long a shrink takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

SECONDS = 10
#: Engines after which memory is measured, and again after as many more. The first ones fill caches and the allocator.
ENGINES = 500
COMMAND = [sys.executable, "-m", "kvfix_tools.cli", "lab", "fuzz", "--json", "--no-fixes", "--shrink", "0"]
MEMORY = """
import os
from kvfix_tools.lab import runner
runner.prepare({path!r})
from kvfix_tools.lab.fuzz_run import Run, fuzz
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
result = []
for first in (0, {engines}):
    fuzz(Run("v1", False), range(first, first + {engines}), 3600, shrinking=0)
    result.append(resident())
"""
SHRINK = """
import time
from kvfix_tools.lab import runner
runner.prepare({path!r})
from kvfix_tools.lab.fuzz_run import Run, fuzz
with runner.quiet():
    from kvfix_tools.lab.fuzz import shrink, signature
    result = []
    for found in fuzz(Run({connector!r}, False), range(60), 600, shrinking=0).violations:
        start = time.monotonic()
        short = shrink(found.schedule, found.signature, 120)
        result.append([time.monotonic() - start, len(found.schedule.steps), len(short.steps)])
"""


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        options = ["--connector", connector, "--seconds", str(SECONDS), "--lmcache-path", str(RELEASES / release)]
        done = json.loads(Fresh(limit=None).run([*COMMAND, *options]).stdout)
        rate = done["steps"] / done["seconds"]
        yield Row(f"lab fuzz, {connector}", rate, "steps/s", f"LMCache {release}", at_least=1000)
    path = str(RELEASES / "0.5.6")
    before, after = Fresh(limit=None)(MEMORY.format(path=path, engines=ENGINES))
    beside = f"{ENGINES} engines: {before:.0f} MiB"
    yield Row(f"lab fuzz, memory after {2 * ENGINES} engines", after / before, "x", beside, at_most=1.1)
    for connector in ("v1", "mp"):
        took = Fresh(limit=None)(SHRINK.format(path=path, connector=connector))
        longest, steps, short = max(took)
        beside = f"{len(took)} violations; from {steps} steps to {short}"
        yield Row(f"lab shrink, the longest, {connector}", longest, "s", beside, at_most=60)
