"""Logs of real engines that work, and of their servers: kvfix-diagnose must find nothing in them.

    python -m tests.engine.healthy_logs FOLDER    48 of them, half a minute each; the logs stay in FOLDER

Each is a whole engine's life: connector, release of LMCache, log level, ranks, workload and mode of kvfix are drawn in
turn. It counts only if it answered every request, and loaded what it had stored. Exit 1 if something is found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvfix_tools.diagnose.diagnosis import diagnosed
from tests.conftest import RELEASES
from tests.engine import start
from tests.engine.start import CROWD, REPORT
from tests.engine.test_bugs import ABORT, ONE

WORKLOADS: dict[str, dict[str, Any]] = {
    "preemptions": {"rounds": [CROWD, CROWD]},
    "long prompts": {"rounds": [REPORT, REPORT, REPORT]},
    "aborts": {"rounds": [[(ONE, 5)], [(ONE, 5)], [(ONE, 5)]], "abort": ABORT, "abort_before": 1},
    "two ranks": {"rounds": [CROWD, CROWD], "engine": {**start.ENGINE, "tensor_parallel_size": 2}},
}
#: In process with these, and in the multi-process mode with the newest. Those before 0.5.5 warn that they guess the
#: layout of this vLLM (KVD777): theirs is not a healthy log.
IN_PROCESS = ("0.5.6", "0.5.5")


class Case(NamedTuple):
    connector: str
    lmcache: str
    workload: str
    level: str
    mode: str

    def __str__(self) -> str:
        return "-".join(self).replace(" ", "_")


def cases() -> Iterator[Case]:
    connectors = [("mp", IN_PROCESS[0]), *(("v1", each) for each in IN_PROCESS)]
    drawn = itertools.product(("DEBUG", "INFO"), WORKLOADS, ("fix", "check"), connectors)
    return (Case(connector, lmcache, workload, level, mode) for level, workload, mode, (connector, lmcache) in drawn)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What kvfix-diagnose finds in the log of this engine, or of its server, and whether it worked."""
    with ExitStack() as stack:
        transfer = start.v1(64) if case.connector == "v1" else stack.enter_context(start.server())
        levels = {"LMCACHE_LOG_LEVEL": case.level, "VLLM_LOGGING_LEVEL": case.level}
        ran = start.run(
            folder, True, transfer, mode=case.mode, lmcache=RELEASES / case.lmcache, environment=levels,
            forked=False, **WORKLOADS[case.workload],
        )  # fmt: skip
    found = diagnosed(ran.log.encode())
    return {
        "case": str(case),
        "healthy": ran.answer is not None and ran.count("load") > 0,
        "lines": ran.log.count("\n"),
        "lookups": found.counts["asked"],
        "findings": [each.rule.code for each in found.findings],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.healthy_logs", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="every so many only: others run beside it")
    wanted = parser.parse_args(arguments)
    wrong = 0
    for number, case in itertools.islice(enumerate(cases()), wanted.first, None, wanted.step):
        found = run(case, wanted.folder / f"{number:02}-{case}")
        wrong += bool(found["findings"]) or not found["healthy"]
        print(json.dumps(found), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
