"""Evidence that a fix acts: it counts in the scenarios of its bug, and not in a healthy schedule."""

from __future__ import annotations

from typing import Any

import pytest

from kvfix import acting, catalogue
from kvfix.session import session
from kvfix_tools.lab import runner
from kvfix_tools.lab.fuzz.schedule import draw
from kvfix_tools.lab.scenario import find
from tests import late
from tests.conftest import RELEASES, Once

SEEDS = 20
#: Counts of a schedule in which something goes wrong, or is undone.
DISTURBED = ("preemptions", "aborts", "aborted", "loads_failed", "leases_ended")
#: What they correct shows only later: a worker that is idle, a load that fails, a request that ends, a copy.
AHEAD = {"KVF109", "KVF110", "KVF113", "KVF216"}
#: In this scenario no registration raises in the wrapped function: KVF322 gives the load up.
BY_OTHERS = "nixl-push-thread-loses-notices"


def _counted() -> dict[str, int]:
    return {code: tally.acted for code, tally in session.tallies.items() if tally.acted}


def in_scenarios() -> dict[str, dict[str, int]]:
    """{fix: {scenario that this release shows: how often the fix acted}}.

    If another fix has corrected it before, the scenario is played with the fix alone.
    """
    found: dict[str, dict[str, int]] = {}
    for fix in catalogue.fixes():
        for scenario in filter(None, map(find, fix.scenarios)):
            if fix.fixable and runner.expected(scenario) == "violated":
                session.tallies.pop(fix.code, None)
                runner.play(scenario, fixes=True)
                if not acting.of(fix.code).acted:
                    runner.play(scenario, fixes=True, only=[fix.code])
                found.setdefault(fix.code, {})[scenario.slug] = acting.of(fix.code).acted
    return found


def in_healthy(connector: str) -> dict[str, Any]:
    """Return the fixes that acted in random schedules without violations, aborts, preemptions or losses as released."""
    healthy = 0
    session.tallies.clear()
    for seed in range(SEEDS):
        schedule = draw(seed, connector, plain=True)
        with runner.applied(False):
            released = late.play(schedule)
        if released.violations or any(released.counts.get(name) for name in DISTURBED):
            continue
        healthy += 1
        with runner.applied(True):
            late.play(schedule)
    return {"healthy": healthy, "acted": _counted()}


def test_in_the_scenarios_of_its_bug(once: Once) -> None:
    found: dict[str, dict[str, int]] = once(in_scenarios, RELEASES / "0.5.6")
    none = {slug for counts in found.values() for slug, count in counts.items() if not count}
    assert none <= {BY_OTHERS}
    assert len(found) > 60


@pytest.mark.parametrize(
    "connector", ["v1", "mp", "offloading", "simple-offload", "nixl-pull", "nixl-push", "mooncake"]
)
def test_not_in_a_healthy_schedule(connector: str, once: Once) -> None:
    found = once(in_healthy, RELEASES / "0.5.6", connector)
    assert set(found["acted"]) <= AHEAD
    assert found["healthy"] > 0
