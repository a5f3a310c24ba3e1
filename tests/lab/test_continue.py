"""`kvfix lab continue` rebuilds an engine from a saved state. The new engine is stuck if the saved engine was stuck."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.lab import runner
from tests import late
from tests.conftest import NEWEST, Once
from tests.engine_state import test_watchdog, wedged


def saved(engine: str, steps: int = 0) -> dict[str, Any]:
    """Make `steps` steps, save the state as `kvfix look --save` does, and return the lab's results for this state."""
    with runner.applied(fixes=False):
        lab = getattr(wedged, engine)()
        lab.step(steps)
        state = wedged.look(lab, full=True)
    file = Path(tempfile.mkdtemp()) / "look.json"
    file.write_text(json.dumps({"schema": 1, "kind": "look", "processes": [state]}))
    done = late.continue_state.continued(file)
    short = late.continue_state.shortest(done, 20.0)
    with runner.applied(fixes=False):
        rules = sorted({found.code for found in late.play(short).findings})
    before = {row["id"]: [row["computed"], row["blocks"]] for row in state["scheduler"]["requests"]}
    return {
        **done.as_json({}),
        "before": before, "steps": len(done.schedule.steps), "short": len(short.steps), "rules": rules,
    }  # fmt: skip


def of_watchdog(engine: str) -> dict[str, Any]:
    """Let the watchdog report this engine. Return the lab's results for the file that the watchdog wrote."""
    return late.continue_state.continued(Path(test_watchdog.wedge(engine)["line"].rpartition(": ")[2])).as_json({})


def test_a_reservation_deadlock_is_stuck_and_moves_with_the_fix(once: Once) -> None:
    saved_one, written = (once(made, NEWEST, "locked_out_engine") for made in (saved, of_watchdog))
    for found in (saved_one, written):
        stuck = found["as_released"]["stuck"]
        assert "1 request is loaded and waits behind r, which needs 8 blocks; 4 are free" in stuck
        assert (found["with_fixes"]["stuck"], found["differs"]) == ("", [])
    assert saved_one["with_fixes"]["ended"] == saved_one["with_fixes"]["requests"] == 2
    assert saved_one["frees"] == ["r", "low"]
    assert saved_one["short"] < saved_one["steps"]
    assert "LAB009" in saved_one["rules"]


@pytest.mark.parametrize("steps", [0, 2, 9])
def test_an_engine_that_works_moves(steps: int, once: Once) -> None:
    found = once(saved, NEWEST, "busy_engine", steps)
    for outcome in (found["as_released"], found["with_fixes"]):
        assert outcome["stuck"] == ""
        assert outcome["also"] == []
        assert outcome["ended"] == outcome["requests"] > 0
    assert found["differs"] == []


def test_a_file_without_a_state(tmp_path: Path) -> None:
    file = tmp_path / "look.json"
    file.write_text('{"schema": 1, "kind": "look", "processes": []}')
    with pytest.raises(ValueError, match="state of 0 schedulers, but the lab needs one"):
        late.continue_state.continued(file)
