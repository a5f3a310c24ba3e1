"""A fault in any part of the connector events changes no decision of the scheduler, and is logged in one line."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RELEASES, run_forked
from tests.connector_events.faults import FAULTS

#: These plant a finding, which is logged like any other, in its own line.
WITH_FINDING = ["a violation", "odd object in an event", "report", "fixes of a finding", "metrics", "disk full"]
WITH_FINDING += ["read-only directory", "snapshot", "sizes"]
#: A clock that goes back, a signal and an object that JSON cannot encode are no faults of kvfix.
HARMLESS = ["nothing", "a violation", "odd object in an event", "clock goes back", "wall clock goes back"]
HARMLESS += ["signal in a hook"]


@cache
def _run() -> dict[str, Any]:
    script = Path(__file__).with_name("faults.py")
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = run_forked([sys.executable, str(script), str(RELEASES / "0.5.6")], Path(folder))
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
    return {"error": done.stderr[-3000:]} if done.returncode else dict(json.loads(done.stdout.splitlines()[-1]))


def played() -> dict[str, Any]:
    """One process plays everything. If it fails, every test shows why, and none runs it again."""
    assert "error" not in _run(), _run()["error"]
    return _run()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_goes_on(fault: str) -> None:
    found = played()["faults"][fault]
    assert found["same"], found
    findings = [line for line in found["logged"] if line.startswith("KVR")]
    assert bool(findings) is (fault in WITH_FINDING), found
    assert len(found["logged"]) - len(findings) == (fault not in HARMLESS), found


def test_the_schedules_have_events() -> None:
    assert played()["events"] > 500
    assert played()["faults"]["a violation"]["written"] == 1  # once for all of this kind
    assert played()["faults"]["odd object in an event"]["written"] > 0
    assert played()["faults"]["signal in a hook"]["dumps"] > 0


def test_a_fuzz_in_mode_check_has_no_finding() -> None:
    """With the fixes no rule is violated, whatever is aborted, evicted or lost."""
    assert played()["steps"] > 1500
    # KVF015 logs a worker that does not answer: that is no finding.
    assert [line for line in played()["fuzz"] if not line.startswith("KVF015: ")] == []
