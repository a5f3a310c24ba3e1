"""No fix changes what a healthy schedule does: the same questions, answers, loads and stores, event by event.

A schedule is healthy if nothing is violated when it is played as released.
"""

from typing import Any

import pytest

import kvfix
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late
from tests.conftest import RELEASES, Once
from tests.healthy import changing, events, violated

SEEDS = 40
#: {(connector, release): healthy schedules of SEEDS}. The other schedules show a bug.
PLAYED = [("v1", "0.3.11"), ("v1", "0.4.3"), ("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")]


def compared(connector: str) -> dict[str, Any]:
    healthy, differ, loaded, preempted = 0, [], 0, 0
    for seed in range(SEEDS):
        schedule = draw(seed, connector, plain=True)
        kvfix.revert()
        released = late.play(schedule)
        kvfix.apply()
        fixed = late.play(schedule)
        if violated(released):
            continue
        if violated(fixed):
            differ.append([seed, violated(fixed)[0]])
        if others := changing(connector):
            kvfix.apply(skip=others)
            fixed = late.play(schedule)
        healthy += 1
        loaded += released.counts["loaded_tokens"]
        preempted += released.counts["preemptions"]
        pairs = zip(events(released), events(fixed), strict=False)
        differ += [[seed, repr(one), repr(other)] for one, other in pairs if one != other][:1]
        if len(released.log) < len(fixed.log):
            differ.append([seed, "more events"])
    return {"healthy": healthy, "differ": differ, "loaded": loaded, "preempted": preempted}


@pytest.mark.parametrize(("connector", "release"), PLAYED)
def test_same_decisions(connector: str, release: str, once: Once) -> None:
    found = once(compared, RELEASES / release, connector)
    assert found["differ"] == []
    assert found["healthy"] >= SEEDS // 4
    assert found["loaded"] > 0
    assert found["preempted"] > 0
