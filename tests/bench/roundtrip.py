"""The round trip: its torch backend compared with a plain copy, and the seconds of the default matrix, on the CPU.

The promise of 0.95 of a pinned copy is one for a GPU; `kvfix roundtrip --device cuda` measures it there.
"""

import json
import resource
import sys
from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import Fresh

COMMAND = [sys.executable, "-m", "kvfix_tools.cli", "roundtrip", "--device", "cpu", "--json"]
ONE = ["--layout", "nhd", "--dtype", "uint8", "--tokens", "1", "--slots", "blocks", "--block", "16"]
ONE += ["--chunk", "16", "--heads", "1", "--skip", "none"]
MATRIX = ["torch", "lmcache", "lmcache-engine", "vllm"]


def measure() -> Iterator[Row]:
    speed = json.loads(Fresh(limit=None).run([*COMMAND, *ONE, "--gib", "0.125"]).stdout)["speed"][0]
    for way in ("store", "load"):
        plain = speed[f"plain_{way}_gb_s"]
        measured, context = speed[f"{way}_gb_s"] / plain, f"a plain copy, {plain:.1f} GB/s"
        yield Row(f"roundtrip, torch backend, {way}", measured, "x", context, at_least=0.2)
    start = seconds()
    done = Fresh(limit=None).run([*COMMAND, "--backend", *MATRIX, "--gib", "0"])
    cells = len(json.loads(done.stdout)["cells"])
    taken = seconds() - start
    yield Row("roundtrip, default matrix", taken, "CPU s", f"{cells} cells, imports included", at_most=60)


def seconds() -> float:
    """Return the processor seconds of ended children: other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
