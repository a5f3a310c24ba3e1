"""Logs of real engines that work, and of their servers: kvfix-diagnose must find nothing in them.

    python -m tests.engine.healthy_logs FOLDER    48 lives, half a minute each; the logs stay in FOLDER

Connector, release of LMCache, log level, ranks, workload and mode of kvfix are drawn in turn. A life counts only if the
engine answered every request, and loaded what it had stored. Exit 1 if something is found.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import RELEASES
from tests.diagnose.lines import diagnose_files
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
    """Return the findings in the logs of this engine and its server, and True if the engine worked."""
    logs = [folder / "log", folder / "server.log"][: 2 if case.connector == "mp" else 1]
    levels = {"LMCACHE_LOG_LEVEL": case.level, "VLLM_LOGGING_LEVEL": case.level}
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        mp = case.connector == "mp"
        transfer = stack.enter_context(start.server(log=logs[1], **levels)) if mp else start.v1(64)
        ran = start.run(
            folder, True, transfer, mode=case.mode, lmcache=RELEASES / case.lmcache, environment=levels,
            forked=False, **WORKLOADS[case.workload],
        )  # fmt: skip
    whole = diagnose_files(*logs)
    return {
        "case": str(case),
        "healthy": ran.written is not None and ran.count("load") > 0,
        "lines": sum(path.read_bytes().count(b"\n") for path in logs),
        "lookups": whole.counts["asked"] + whole.counts["mp_prefetched"],
        "findings": sorted(
            {each.rule.code for log in (whole, *map(diagnose_files, logs)) for each in log.findings if not each.is_note}
        ),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.healthy_logs", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder, wrong = parser.parse_args(arguments).folder, 0
    for number, case in enumerate(cases()):
        ran = run(case, folder / f"{number:02}-{case}")
        wrong += bool(ran["findings"]) or not ran["healthy"]
        print(json.dumps(ran), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
