"""The stages that run `kvfix roundtrip`. All runs of a stage are in one process, which imports torch only once.

LMCache without fixes may make the GPU unusable for the whole process. So runs with fixes use other processes.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvfix_tools.roundtrip import command
from kvfix_tools.roundtrip.run_report import RunReport, check_per_copy, counted, operations, rates
from maintain.gpu import stages

KEPT = 10  # maximum number of failed cells (test cases) to keep in full
#: OF_PLAIN: minimum speed, divided by a plain copy's speed. OF_COPIES: maximum check time, divided by a copy's time.
OF_PLAIN, OF_COPIES = 0.95, 2.0


def passes(report: RunReport) -> bool:
    return report.code == 0


def fast(report: RunReport) -> bool:
    return passes(report) and all(
        one.verdict == "passed"
        and min(one.plain_store / one.store, one.plain_load / one.load) >= OF_PLAIN
        and check_per_copy(one) <= OF_COPIES
        for one in report.speeds
    )


def found(report: RunReport) -> bool:
    """Return True if at least one cell has the planted fault, and the check finds the fault in each of these cells."""
    tried, named = report.planted
    return 0 < tried == named


def known(report: RunReport) -> bool:
    """Return True if known bugs of the released LMCache cause all failures."""
    return all(report.known(one) for one in report.results if one.verdict in ("failed", "crashed"))


def differs(report: RunReport) -> bool:
    """Return True if each engine loaded tokens, and its outputs differ from outputs without a connector."""
    wrong = ["outputs differ" in one.reason and " 0 loaded" not in one.operations for one in report.results]
    return bool(wrong) and all(wrong)


FAULTS = ("swap-kv", "shift-slot", "stale", "bitflip", "drop-tail", "wrong-layer", "neighbour-write")
#: Options for 1 GiB of KV: 8192 tokens of a model with 8 billion parameters.
LARGE = "--dtype bfloat16 --heads 8 --layers 32 --head-size 128 --block 16 --chunk 256 --slots blocks --tokens 8192"
LARGE = f"{LARGE} --skip none --gib 0"
RUNS: dict[str, list[tuple[str, str, Callable[[RunReport], bool]]]] = {
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
    # LMCache issue 4463: the engine loads all promised tokens, but then gives wrong answers.
    "engines": [
        ("in process, as released", "--backend engine-v1 --no-fixes", differs),
        ("in mode check", "--backend engine", passes),
    ],
    "vllm": [("matrix", "--backend vllm-simple vllm-offload --gib 4", passes)],
}
#: {option: option with a smaller size}, to test the scripts on a CPU.
SMALL = {"--gib 32": "--gib 0.03", "--gib 4": "--gib 0.03", "--tokens 8192": "--tokens 512"}


def main(arguments: list[str]) -> int:
    name, device = stages.device(arguments)
    if name == "engines":
        os.environ["KVFIX"] = "check"  # apply the fixes and check the rules
    done = stages.Steps()
    for what, words, right in RUNS[name]:
        if device == "cpu":
            for large, small in SMALL.items():
                words = words.replace(large, small)
        options = command.parser().parse_args([*words.split(), "--device", device])
        report = command.run(options, command.chosen(options))
        done.add(what, right(report), figures(report), options=words, **kept(report))
    return done.code


def figures(report: RunReport) -> str:
    parts = [counted(report.results)]
    parts += [f"{name} was not tested: {why}" for name, why in report.skipped.items()]
    for backend in dict.fromkeys(one.cell.backend for one in report.results if report.options.inject is None):
        mine = [one for one in report.results if one.cell.backend == backend]
        parts.append(f"{backend} ({operations(mine) or mine[0].reason}) {rates(mine)}".rstrip())
    return "; ".join([*parts, *(line for one in report.speeds for line in report.speed(one))])


def kept(report: RunReport) -> dict[str, Any]:
    answer = report.as_dict()
    cells = Counter((one.cell.backend, one.cell.layout, one.race, one.verdict) for one in report.results)
    wrong = [cell for cell in answer["cells"] if cell["verdict"] in ("failed", "crashed")]
    return {
        **{name: answer[name] for name in ("exit", "fixes", "speed")},
        "cells": [[*key, count] for key, count in cells.items()],
        "wrong": [] if report.options.inject is not None else wrong[:KEPT],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
