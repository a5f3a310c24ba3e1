"""The stages that are runs of `kvfix roundtrip`. The runs of one stage share a process, so torch is imported once.

LMCache as released and LMCache with the fixes are never in one process. A cell that makes the GPU fail also fails all
later cells of its process.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from maintain.gpu import steps

#: Maximum failed cells that are kept in full.
KEPT = 10
#: Minimum speed relative to a plain pinned copy, and maximum time of the whole check relative to the copies alone.
OF_PLAIN, OF_COPIES = 0.95, 2.0
Answer = dict[str, Any]


def passes(answer: Answer) -> bool:
    return bool(answer["exit"] == 0)


def fast(answer: Answer) -> bool:
    return passes(answer) and all(
        one["verdict"] == "passed"
        and min(one["store_gb_s"] / one["plain_store_gb_s"], one["load_gb_s"] / one["plain_load_gb_s"]) >= OF_PLAIN
        and times(one) <= OF_COPIES
        for one in answer["speed"]
    )


def found(answer: Answer) -> bool:
    """The planted fault fails every cell in which it can be planted, and is named there."""
    from kvfix_tools.roundtrip.planted_faults import FAULTS as CLASSES

    tried, kind = [cell for cell in answer["cells"] if cell["verdict"] != "refused"], CLASSES[answer["inject"]]
    return bool(tried) and all(
        any(not kind or kind in finding["classes"] for finding in cell["findings"]) for cell in tried
    )


def known(answer: Answer) -> bool:
    """Return True if the failures of LMCache as released are a known bug."""
    return all(cell["known"] for cell in answer["cells"] if cell["verdict"] in ("failed", "crashed"))


FAULTS = ("swap-kv", "shift-slot", "stale", "bitflip", "drop-tail", "wrong-layer", "neighbour-write")
#: 1 GiB: 8192 tokens of a model with 8 billion parameters.
LARGE = "--dtype bfloat16 --heads 8 --layers 32 --head-size 128 --block 16 --chunk 256 --slots blocks --tokens 8192"
LARGE = f"{LARGE} --skip none --gib 0"
RUNS: dict[str, list[tuple[str, str, Callable[[Answer], bool]]]] = {
    "torch": [
        ("matrix", "--gib 0", passes),
        *((f"inject {fault}", f"--gib 0 --inject {fault}", found) for fault in FAULTS),
        ("races", "--race", passes),
        ("races without events", "--race --inject missing-event", found),
    ],
    "torch-32-gib": [("32 GiB", "--layout nhd --dtype bfloat16 --tokens 1 --gib 32", fast)],
    "lmcache": [("with fixes", "--backend lmcache lmcache-engine --gib 4", passes)],
    "lmcache-released": [("as released", "--backend lmcache lmcache-engine --gib 0 --no-fixes", known)],
    "lmcache-speed-released": [
        ("nhd", f"--backend lmcache-v2 lmcache-v3 lmcache-layerwise --layout nhd {LARGE} --no-fixes", passes),
        ("hnd", f"--backend lmcache-layerwise --layout hnd {LARGE} --no-fixes", known),
    ],
    "lmcache-speed": [
        ("KVF020", f"--backend lmcache-v2 lmcache-v3 lmcache-mp --layout packed {LARGE}", passes),
        ("KVF021", f"--backend lmcache-layerwise --layout hnd {LARGE}", passes),
    ],
    "vllm": [("matrix", "--backend vllm-simple vllm-offload --gib 4", passes)],
}
#: On CPU tensors, to test the scripts.
SMALL = {"--gib 32": "--gib 0.03", "--gib 4": "--gib 0.03", "--tokens 8192": "--tokens 512"}


def main(arguments: list[str]) -> int:
    name, device = steps.device(arguments)
    from kvfix_tools.roundtrip import command

    done = steps.Steps()
    for what, options, right in RUNS[name]:
        if device == "cpu":
            for large, small in SMALL.items():
                options = options.replace(large, small)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = command.main([*options.split(), "--device", device, "--json"])
        if not printed.getvalue():
            done.add(what, False, f"kvfix roundtrip ended with {code}", options=options)
            continue
        answer = json.loads(printed.getvalue())
        done.add(what, right(answer), figures(answer), options=options, **kept(answer))
    return done.code


def figures(answer: Answer) -> str:
    """Return the verdicts, and the operations and the speed of each backend."""
    verdicts = Counter(cell["verdict"] for cell in answer["cells"])
    parts = [", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())]
    parts += [f"{name} not here: {why}" for name, why in answer["skipped"].items()]
    if answer["inject"] is None:
        for backend, operations in moved_by(answer).items():
            parts.append(f"{backend} by {operations}{rate(answer['cells'], backend)}")
    for one in answer["speed"]:
        if one["verdict"] == "refused":
            parts.append(f"{one['backend']} not timed: {one['reason']}")
            continue
        ways = (
            f"{way} {one[f'{way}_gb_s']:.1f} GB/s, {one[f'{way}_gb_s'] / one[f'plain_{way}_gb_s']:.2f} of a plain copy"
            for way in ("store", "load")
        )
        check = f"check {one['check_seconds']:.1f} s, {times(one):.1f} times the copies"
        parts.append(f"{one['backend']} {one['bytes'] / (1 << 30):.1f} GiB {', '.join(ways)}, {check}")
    return "; ".join(part for part in parts if part)


def moved_by(answer: Answer) -> dict[str, str]:
    names: dict[str, list[str]] = {}
    for cell in answer["cells"]:
        ran = names.setdefault(cell["cell"]["backend"], [])
        if cell["operations"] and cell["operations"] not in ran:
            ran.append(cell["operations"])
    return {backend: " and ".join(ran) for backend, ran in names.items()}


def rate(cells: list[Answer], backend: str) -> str:
    """Return the GB/s of the median cell of a backend."""
    timed = [cell for cell in cells if cell["cell"]["backend"] == backend and cell["load_gb_s"] and cell["store_gb_s"]]
    if not timed:
        return ""
    store, load = (median(cell[f"{way}_gb_s"] for cell in timed) for way in ("store", "load"))
    return f" store {store:.2f} load {load:.2f} GB/s"


def times(speed: Answer) -> float:
    """Return the time of the whole check relative to the copies alone."""
    copies = speed["bytes"] / 1e9 * (1 / speed["plain_store_gb_s"] + 1 / speed["plain_load_gb_s"])
    return float(speed["check_seconds"] / copies)


def kept(answer: Answer) -> Answer:
    """Return the answer without passed cells, which are only counted."""
    counts = Counter((c["cell"]["backend"], c["cell"]["layout"], c["race"], c["verdict"]) for c in answer["cells"])
    wrong = [cell for cell in answer["cells"] if cell["verdict"] in ("failed", "crashed")]
    of_fault = answer["inject"] is not None
    return {
        "exit": answer["exit"],
        "fixes": answer["fixes"],
        "cells": [[*key, count] for key, count in counts.items()],
        "wrong": [] if of_fault else wrong[:KEPT],
        "speed": answer["speed"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
