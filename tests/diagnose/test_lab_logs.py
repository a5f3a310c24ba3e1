"""One ledger, two sources: what the lab's real connectors say in their own log is judged as what they did was.

The log lines are LMCache's, at DEBUG, as its real adapter prints them under the real scheduler.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvfix_tools.diagnose import scan
from kvfix_tools.diagnose.case import Case
from tests.conftest import RELEASES, Zygote

CODE = """
import io, os, sys, traceback
os.environ["LMCACHE_LOG_LEVEL"] = "DEBUG"
sys.stderr = log = io.StringIO()  # LMCache's handlers take it when they are made
from kvfix_tools.lab import runner
runner.prepare(None)
from kvfix_tools.lab.play import play
from kvfix_tools.lab.schedule import draw
result = []
for seed in range({seeds}):
    done = play(draw(seed, "v1", plain=True))
    violated = [found.code for found in done.findings if found.verdict == "violated" and found.code != "KVR009"]
    result.append([violated, log.getvalue(), done.counts["loaded_tokens"]])
    log.seek(0)
    log.truncate()
"""


def diagnose(log: str) -> Case:
    case = Case()
    case.take("log", 1, scan.hits(log.encode()))
    case.end()
    return case


@pytest.mark.parametrize("release", ["0.3.12", "0.4.3", "0.5.6"])
def test_what_is_right_in_the_lab_is_right_in_its_log(release: str, zygote: Zygote) -> None:
    played: list[Any] = zygote(CODE.format(seeds=12), RELEASES / release)
    healthy = [(log, loaded) for violated, log, loaded in played if not violated]
    assert len(healthy) > 3
    judged = 0
    for log, _ in healthy:
        case = diagnose(log)
        assert [found.rule.code for found in case.findings] == [], [found.sentence for found in case.findings]
        assert case.debug
        judged += case.counts["due"]
    assert judged > 0
    assert sum(loaded for _, loaded in healthy) > 0
