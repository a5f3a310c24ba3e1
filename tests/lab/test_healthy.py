"""No fix changes what a healthy schedule does: the same questions, answers, loads and stores, event by event.

A schedule is healthy if nothing is violated when it is played as released.
"""

import pytest

from tests.conftest import RELEASES, Once
from tests.healthy import UNSEEN

SEEDS = 40
#: connector, release -> healthy schedules of SEEDS. In others a bug shows, which its fix is there to change.
PLAYED = [("v1", "0.3.11"), ("v1", "0.4.3"), ("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")]
CODE = """
import kvfix
from tests.healthy import events, violated
with runner.quiet():
    from kvfix_tools.lab.fuzz import play
    from kvfix_tools.lab.schedule import draw
    healthy, differ, loaded, preempted = 0, [], 0, 0
    for seed in range({seeds}):
        schedule = draw(seed, {connector!r}, plain=True)
        kvfix.revert()
        released = play(schedule)
        kvfix.apply()
        fixed = play(schedule)
        if violated(released):
            continue
        if violated(fixed):
            differ.append([seed, violated(fixed)[0]])
        if {unseen}:
            kvfix.apply(skip={unseen})
            fixed = play(schedule)
        healthy += 1
        loaded += released.counts["loaded_tokens"]
        preempted += released.counts["preemptions"]
        pairs = zip(events(released), events(fixed))
        differ += [[seed, repr(one), repr(other)] for one, other in pairs if one != other][:1]
        if len(released.log) < len(fixed.log):
            differ.append([seed, "more events"])
result = {{"healthy": healthy, "differ": differ, "loaded": loaded, "preempted": preempted}}
"""


@pytest.mark.parametrize(("connector", "release"), PLAYED)
def test_same_decisions(connector: str, release: str, once: Once) -> None:
    unseen = UNSEEN.get(connector, [])
    found = once(CODE.format(connector=connector, seeds=SEEDS, unseen=unseen), RELEASES / release)
    assert found["differ"] == []
    assert found["healthy"] >= SEEDS // 4
    assert found["loaded"] > 0
    assert found["preempted"] > 0
