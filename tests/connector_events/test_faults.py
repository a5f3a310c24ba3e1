"""A fault in any part of the connector events changes no decision of the scheduler, and is logged in one line."""

from typing import Any

import pytest

from tests.conftest import RELEASES, Once
from tests.connector_events.faults import FAULTS, play_all

#: These plant a finding, which is logged like any other, in its own line.
WITH_FINDING = ["a violation", "odd object in an event", "report", "fixes of a finding", "metrics", "disk full"]
WITH_FINDING += ["read-only directory", "snapshot", "sizes"]
#: A clock that goes back, a signal and an object that JSON cannot encode are no faults of kvfix.
HARMLESS = ["nothing", "a violation", "odd object in an event", "clock goes back", "wall clock goes back"]
HARMLESS += ["signal in a hook"]


@pytest.fixture(scope="module")
def played(once: Once) -> dict[str, Any]:
    return dict(once(play_all, RELEASES / "0.5.6"))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_goes_on(fault: str, played: dict[str, Any]) -> None:
    found = played["faults"][fault]
    assert found["same"], found
    findings = [line for line in found["logged"] if line.startswith("KVR")]
    assert bool(findings) is (fault in WITH_FINDING), found
    assert len(found["logged"]) - len(findings) == (fault not in HARMLESS), found


def test_the_schedules_have_events(played: dict[str, Any]) -> None:
    assert played["events"] > 500
    assert played["faults"]["a violation"]["written"] == 1  # once for all of this kind
    assert played["faults"]["odd object in an event"]["written"] > 0
    assert played["faults"]["signal in a hook"]["dumps"] > 0


def test_a_fuzz_in_mode_check_has_no_finding(played: dict[str, Any]) -> None:
    """With the fixes no rule is violated, whatever is aborted, evicted or lost."""
    assert played["steps"] > 1500
    # KVF015 logs a worker that does not answer: that is no finding.
    assert [line for line in played["fuzz"] if not line.startswith("KVF015: ")] == []
