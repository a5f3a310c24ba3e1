"""Measure `kvfix.apply()` in a new process, and kvfix's time while a process imports the modules of an engine."""

import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter

from tests.bench import Row
from tests.conftest import Fresh, clean_environment

PAIRS = 25
IMPORTS = 3

#: This code measures the processor time of kvfix (`apply()`, then `_settle` and `_is_target`) and of the process.
WHOLE = """
from time import thread_time
from tests.engine.plugin.kvfix_engine_times import Spent, timed

started = thread_time()
import kvfix
kvfix.apply()
from kvfix import activation
own = Spent()
own.seconds = thread_time() - started
for name in ("_settle", "_is_target"):
    setattr(activation, name, timed(getattr(activation, name), own))
import vllm.v1.core.sched.scheduler, vllm.v1.engine.core
import lmcache.integration.vllm.vllm_v1_adapter, lmcache.v1.cache_engine
result = [own.seconds, thread_time() - started]
"""


def measure() -> Iterator[Row]:
    # run the two programs in turn, so that a slow moment of the host slows down both programs
    times = [(run("pass"), run("import kvfix; kvfix.apply()")) for _ in range(PAIRS)]
    bare, with_kvfix = map(median, zip(*times, strict=True))
    yield Row("import kvfix; kvfix.apply()", with_kvfix - bare, "ms", f"python -c pass {bare:.1f} ms", at_most=15)
    figures = [Fresh(limit=None)(WHOLE) for _ in range(IMPORTS)]
    share = median(own / (total - own) * 100 for own, total in figures)
    total = median(total for _, total in figures)
    context = f"imports of vLLM's scheduler and core and of LMCache's adapter and engine, {total:.1f} s of a core"
    yield Row("kvfix's share of the processor time of an engine's imports", share, "%", context, at_most=1)


def run(code: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)
    return (perf_counter() - start) * 1000
