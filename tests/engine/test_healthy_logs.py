"""kvfix-diagnose finds nothing in the logs of healthy real engines and of their servers (48 engines, 24 minutes).

`pytest -m healthy --basetemp FOLDER tests/engine/test_healthy_logs.py` empties FOLDER, and leaves the logs there.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.healthy
@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("mode", ["fix", "check"])
# LMCache before 0.5.5 logs that it guesses the layout of vLLM's KV. kvfix-diagnose finds KVD777 in this log.
@pytest.mark.parametrize(("connector", "lmcache"), [("mp", "0.5.6"), ("v1", "0.5.6"), ("v1", "0.5.5")])
def test_a_healthy_engine(level: str, workload: str, mode: str, connector: str, lmcache: str, tmp_path: Path) -> None:
    mp = connector == "mp"
    logs = [tmp_path / "log", tmp_path / "server.log"][: 1 + mp]
    levels = {"LMCACHE_LOG_LEVEL": level, "VLLM_LOGGING_LEVEL": level}
    with start.server(log=logs[-1], **levels) if mp else nullcontext(start.v1(64)) as transfer:
        ran = start.run(
            tmp_path, True, transfer, mode=mode, lmcache=RELEASES / lmcache, environment=levels,
            forked=False, **WORKLOADS[workload],
        )  # fmt: skip
    assert ran.written is not None
    assert ran.count("load") > 0
    for read in (logs, *([log] for log in logs)):
        assert not {each.rule.code for each in diagnose_files(*read).findings if not each.is_note}
