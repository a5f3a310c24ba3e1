"""Steps a second of the fuzzed scheduler with all oracles on, one core, after imports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import RELEASES, Fresh

SECONDS = 10
COMMAND = [sys.executable, "-m", "kvfix_tools.cli", "lab", "fuzz", "--json", "--no-fixes", "--shrink", "0"]


def measure() -> Iterator[Row]:
    for connector, release in (("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")):
        options = ["--connector", connector, "--seconds", str(SECONDS), "--lmcache-path", str(RELEASES / release)]
        done = json.loads(Fresh().run([*COMMAND, *options]).stdout)
        rate = done["steps"] / done["seconds"]
        yield Row(f"lab fuzz, {connector}", rate, "steps/s", f"LMCache {release}", at_least=1000)
