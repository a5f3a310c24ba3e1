"""If a fix raises, no outcome is worse than without fixes. `python -m tests.lab.faults 100` raises more errors."""

from kvfix import catalogue, wrapping
from tests.conftest import RELEASES, Once, answers
from tests.lab.faults import faults

#: Fixes with on_fault="closed" that are not tried. LMCache 0.5.6 lacks the bug, or the lab cannot play the bug.
ELSEWHERE = {"KVF008", "KVF014", "KVF019", "KVF020", "KVF024", "KVF103", "KVF106", "KVF115", "KVF206"}


def test_errors_at_drawn_lines(once: Once) -> None:
    found = once(faults, RELEASES / "0.5.6", 2)
    assert found["worse"] == []
    assert {fix.code for fix in catalogue.fixes() if fix.on_fault == "closed"} - set(found["draws"]) <= ELSEWHERE
    assert sum(found["draws"].values()) > 150


@answers(True)
def test_a_fix_that_does_not_fail_closed_is_found() -> bool:
    """Without its `on_fault`, KVF007 lets LMCache store KV that vLLM computed on top of a failed load."""
    before = wrapping.before
    wrapping.before = lambda code, when=None, **_: before(code, when)
    return any("LAB001" in each for each in faults(40, only=("KVF007",))["worse"])
