"""One ledger, two sources: what the lab's real connectors log is judged as what they did.

The log lines are LMCache's, at DEBUG, as its real adapter prints them under the real scheduler.
"""

import io
import os
import sys

import pytest

from kvfix_tools.diagnose.diagnosis import diagnosed
from tests.conftest import RELEASES, ForkServer


def played(seeds: int) -> list[tuple[list[str], str, int]]:
    """For each plain schedule: the rules that it violates, LMCache's log, tokens loaded."""
    os.environ["LMCACHE_LOG_LEVEL"] = "DEBUG"
    sys.stderr = log = io.StringIO()  # LMCache's handlers take it when they are made
    from kvfix_tools.lab import runner

    runner.prepare(None)
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import draw

    found = []
    for seed in range(seeds):
        done = play(draw(seed, "v1", plain=True))
        violated = [each.code for each in done.findings if each.verdict == "violated" and each.code != "KVR009"]
        found.append((violated, log.getvalue(), done.counts["loaded_tokens"]))
        log.seek(0)
        log.truncate()
    return found


@pytest.mark.parametrize("release", ["0.3.12", "0.4.3", "0.5.6"])
def test_what_is_right_in_the_lab_is_right_in_its_log(release: str, fork_server: ForkServer) -> None:
    healthy = [(log, loaded) for violated, log, loaded in fork_server(played, RELEASES / release, 12) if not violated]
    assert len(healthy) > 3
    judged = 0
    for log, _ in healthy:
        diagnosis = diagnosed(log.encode())
        assert [found.rule.code for found in diagnosis.findings] == [], [found.sentence for found in diagnosis.findings]
        assert diagnosis.debug
        judged += diagnosis.counts["due"]
    assert judged > 0
    assert sum(loaded for _, loaded in healthy) > 0
