"""Run healthy real engines and their servers. kvfix-diagnose must find nothing in their logs.

    python -m tests.engine.healthy_logs FOLDER    48 engines, half a minute each; the logs stay in FOLDER

The engines differ in connector, release of LMCache, log level, workload and mode of kvfix. An engine counts as healthy
if it wrote its answers and loaded its stored KV. Exit 1 if a log has a finding or an engine was not healthy.
"""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer

from tests.conftest import RELEASES
from tests.diagnose.lines import diagnose_files
from tests.engine import start
from tests.engine.start import CROWD, REPORT
from tests.engine.test_bugs import ABORT, ONE

WORKLOADS: dict[str, dict[str, Any]] = {
    "preemptions": {"rounds": [CROWD, CROWD]},
    "long prompts": {"rounds": [REPORT, REPORT, REPORT]},
    "aborts": {"rounds": [[(ONE, 5)], [(ONE, 5)], [(ONE, 5)]], "before": {1: [["abort_waiting", ABORT]]}},
    "two ranks": {"rounds": [CROWD, CROWD], "engine": {**start.ENGINE, "tensor_parallel_size": 2}},
}
#: (connector, release of LMCache). Logs of LMCache before 0.5.5 have a finding: it guesses the layout of this
#: vLLM (KVD777).
CONNECTORS = (("mp", "0.5.6"), ("v1", "0.5.6"), ("v1", "0.5.5"))


def run(folder: Path, level: str, workload: str, mode: str, connector: str, lmcache: str) -> dict[str, Any]:
    """Run an engine. Return the findings in the logs of the engine and its server, and `healthy`: the engine worked."""
    mp = connector == "mp"
    logs = [folder / "log", folder / "server.log"][: 1 + mp]
    levels = {"LMCACHE_LOG_LEVEL": level, "VLLM_LOGGING_LEVEL": level}
    folder.mkdir(parents=True, exist_ok=True)
    with start.server(log=logs[1], **levels) if mp else nullcontext(start.v1(64)) as transfer:
        ran = start.run(
            folder, True, transfer, mode=mode, lmcache=RELEASES / lmcache, environment=levels,
            forked=False, **WORKLOADS[workload],
        )  # fmt: skip
    whole = diagnose_files(*logs)
    return {
        "case": folder.name,
        "healthy": ran.written is not None and ran.count("load") > 0,
        "lines": sum(path.read_bytes().count(b"\n") for path in logs),
        "lookups": whole.counts["asked"] + whole.counts["mp_prefetched"],
        "findings": sorted(
            {each.rule.code for log in (whole, *map(diagnose_files, logs)) for each in log.findings if not each.is_note}
        ),
    }


def main(folder: Path) -> None:
    """Run 48 engines, and keep their logs in FOLDER. Exit 1 if a log has a finding."""
    wrong = False
    cases = itertools.product(("DEBUG", "INFO"), WORKLOADS, ("fix", "check"), CONNECTORS)
    for number, (level, workload, mode, (connector, lmcache)) in enumerate(cases):
        words = (level, workload, mode, connector, lmcache)
        ran = run(folder / "-".join((f"{number:02}", *words)).replace(" ", "_"), *words)
        wrong |= bool(ran["findings"]) or not ran["healthy"]
        print(json.dumps(ran), flush=True)
    raise SystemExit(wrong)


if __name__ == "__main__":
    typer.run(main)
