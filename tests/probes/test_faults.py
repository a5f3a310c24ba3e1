"""Never in the way: a fault in any part of the probes changes no decision of the scheduler, and is said in one line."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RELEASES, Fresh
from tests.probes.faults import FAULTS

#: In these a finding is planted, and told as any other: a line of its own.
TOLD = ["a violation", "odd object in an event", "report", "cures", "metrics", "disk full", "read-only directory"]
TOLD += ["snapshot", "sizes"]
#: A clock that goes back, a signal and an object that JSON does not know are no fault of anybody.
HARMLESS = ["nothing", "a violation", "odd object in an event", "clock goes back", "wall clock goes back"]
HARMLESS += ["signal in a hook"]


@cache
def _run() -> dict[str, Any]:
    script = Path(__file__).with_name("faults.py")
    try:
        done = Fresh().run([sys.executable, str(script), str(RELEASES / "0.5.6")])
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
    return {"error": done.stderr[-3000:]} if done.returncode else dict(json.loads(done.stdout.splitlines()[-1]))


def played() -> dict[str, Any]:
    """One process plays all of it; if it fails, every test says why and none runs it again."""
    assert "error" not in _run(), _run()["error"]
    return _run()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_goes_on(fault: str) -> None:
    found = played()["faults"][fault]
    assert found["same"], found
    findings = [line for line in found["said"] if line.startswith("KVR")]
    assert bool(findings) is (fault in TOLD), found
    assert len(found["said"]) - len(findings) == (fault not in HARMLESS), found


def test_something_was_decided() -> None:
    assert played()["events"] > 500
    assert played()["faults"]["a violation"]["written"] == 1  # once for all of this kind
    assert played()["faults"]["odd object in an event"]["written"] > 0
    assert played()["faults"]["signal in a hook"]["dumps"] > 0


def test_a_fuzz_in_mode_check_raises_no_false_alarm() -> None:
    """With the fixes nothing is wrong, whatever is aborted, evicted or lost."""
    assert played()["steps"] > 1500
    # What a fix says of a worker that does not answer is no alarm.
    assert [line for line in played()["fuzz"] if not line.startswith("KVF015: ")] == []
