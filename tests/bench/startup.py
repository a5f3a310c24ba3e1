"""`import kvfix; kvfix.apply()` runs at the start of every process: what it adds to `python -c pass`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter

from tests.bench.row import Row
from tests.conftest import clean_environment

PAIRS = 25


def measure() -> Iterator[Row]:
    bare, with_kvfix = [], []
    for _ in range(PAIRS):  # in turn, so that a slow moment of the machine meets both
        bare.append(run("pass"))
        with_kvfix.append(run("import kvfix; kvfix.apply()"))
    added = median(with_kvfix) - median(bare)
    yield Row("import kvfix; kvfix.apply()", added, "ms", f"python -c pass {median(bare):.1f} ms", at_most=15)


def run(code: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)
    return (perf_counter() - start) * 1000
