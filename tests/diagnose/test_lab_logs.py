"""One ledger, two sources: what the lab's real connectors log is judged as what they did.

The log lines are LMCache's, at DEBUG, as its real adapter prints them under the real scheduler.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvfix_tools.diagnose.diagnosis import diagnosed
from tests.conftest import RELEASES, ForkServer

CODE = """
import io, os, sys, traceback
os.environ["LMCACHE_LOG_LEVEL"] = "DEBUG"
sys.stderr = log = io.StringIO()  # LMCache's handlers take it when they are made
from kvfix_tools.lab import runner
runner.prepare(None)
from kvfix_tools.lab.fuzz import play
from kvfix_tools.lab.schedule import draw
result = []
for seed in range({seeds}):
    done = play(draw(seed, "v1", plain=True))
    violated = [found.code for found in done.findings if found.verdict == "violated" and found.code != "KVR009"]
    result.append([violated, log.getvalue(), done.counts["loaded_tokens"]])
    log.seek(0)
    log.truncate()
"""


@pytest.mark.parametrize("release", ["0.3.12", "0.4.3", "0.5.6"])
def test_what_is_right_in_the_lab_is_right_in_its_log(release: str, fork_server: ForkServer) -> None:
    played: list[Any] = fork_server(CODE.format(seeds=12), RELEASES / release)
    healthy = [(log, loaded) for violated, log, loaded in played if not violated]
    assert len(healthy) > 3
    judged = 0
    for log, _ in healthy:
        diagnosis = diagnosed(log.encode())
        assert [found.rule.code for found in diagnosis.findings] == [], [found.sentence for found in diagnosis.findings]
        assert diagnosis.debug
        judged += diagnosis.counts["due"]
    assert judged > 0
    assert sum(loaded for _, loaded in healthy) > 0
