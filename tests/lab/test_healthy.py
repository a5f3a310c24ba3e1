"""A healthy schedule violates no rule. Fixes do not change the schedule's lookups, promises, loads and stores."""

from typing import Any

import pytest

from kvfix import catalogue
from kvfix.session import session
from kvfix_tools.lab import runner
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late
from tests.conftest import RELEASES, Once
from tests.healthy import changing, events, violated

#: Counters of operations that failed or were undone.
DISTURBED = ("preemptions", "aborts", "aborted", "loads_failed", "leases_ended")


def compared(connector: str, seeds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"healthy": 0, "calm": 0, "differ": [], "loaded": 0, "preempted": 0}
    acted: set[str] = set()
    default = [fix.code for fix in catalogue.fixes() if not fix.opt_in]
    silent = [code for code in default if code not in changing(connector)]

    def played(schedule: Any, only: list[str]) -> Any:
        session.tallies.clear()
        with runner.applied(bool(only), only=only):
            return late.play(schedule)

    for seed in range(seeds):
        schedule = draw(seed, connector, plain=True)
        released = played(schedule, [])
        if violated(released):
            continue
        found["healthy"] += 1
        found["loaded"] += released.counts["loaded_tokens"]
        found["preempted"] += released.counts["preemptions"]
        fixed = played(schedule, runner.played())
        if not released.violations and not any(released.counts.get(name) for name in DISTURBED):
            found["calm"] += 1
            acted |= {code for code, tally in session.tallies.items() if tally.acted}
        found["differ"] += [[seed, *violated(fixed)[:1]]] if violated(fixed) else []
        fixed = played(schedule, silent)
        pairs = zip(events(released), events(fixed), strict=False)
        found["differ"] += [[seed, repr(one), repr(other)] for one, other in pairs if one != other][:1]
        if len(released.log) < len(fixed.log):
            found["differ"].append([seed, "more events"])
    return {**found, "acted": sorted(acted)}


@pytest.mark.parametrize(
    ("connector", "release"),
    [("v1", "0.3.11"), ("v1", "0.4.3"), ("v1", "0.5.6"), ("mp", "0.5.6"), ("mp-in-tree", "0.4.6")],
)
def test_same_decisions(connector: str, release: str, once: Once) -> None:
    found = once(compared, RELEASES / release, connector, 18)
    assert found["differ"] == []
    assert found["healthy"] >= 10
    assert min(found["loaded"], found["preempted"]) > 0


@pytest.mark.parametrize(
    "connector", ["v1", "mp", "offloading", "simple-offload", "nixl-pull", "nixl-push", "mooncake"]
)
def test_no_fix_acts(connector: str, once: Once) -> None:
    found = once(compared, RELEASES / "0.5.6", connector, 18 if connector in ("v1", "mp") else 10)
    # Four fixes act without a bug. KVF109 acts at a request's second store, and KVF110 at a load that skips blocks.
    # KVF113 acts when a worker registers, and KVF216 when a request gets blocks that are still being copied.
    assert set(found["acted"]) <= {"KVF109", "KVF110", "KVF113", "KVF216"}
    assert found["calm"] > 0
