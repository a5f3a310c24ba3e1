"""Play the lab with a real `lmcache server`. Stores, loads and locks are right. The lab finds each planted fault."""

from contextlib import closing
from math import inf
from typing import Any

import pytest

from kvfix_tools.lab import runner
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.connectors import server_process
from kvfix_tools.lab.options import SERVER_CHUNK, Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.lab.planted import FAULTS, is_found, played, steps
from tests.lab.planted_in_real_server import begin_load_and_store

#: Only the schedule of seed 14 restarts the server. More restarts would be slow, because a restart takes 8 s.
SEEDS = range(5, 20)
PLANTED = {name: fault for (setup, name), fault in FAULTS.items() if setup == "mp-real"}
#: Counters that depend on the speed of the server.
ITS_OWN = "evicted_by_server", "lookups_unanswered", "loads_failed"


def play_all() -> dict[str, Any]:
    """Play all parts of this test with one server. Return {"why": error} if the server does not start."""
    try:
        server = server_process.of_this_process()
    except OSError as error:
        return {"why": str(error)}
    with closing(server):
        return {
            **late.fuzz(late.Run("mp", True, real_server=True), SEEDS, inf, shrinking=0).as_json(),
            "same": _played_twice(),
            "sound": {name: played("mp-real", name, False) for name in PLANTED},
            "slow": {fixes: _slow(fixes) for fixes in ("as released", "fixed")},
            "faults": {name: played("mp-real", name) for name in PLANTED},
        }


def _played_twice() -> list[list[int]]:
    """Play eight seeds twice. For each seed with equal ITS_OWN counts and no eviction, return both numbers of steps."""
    run = late.Run("mp", True, real_server=True)
    twice = [[run.play(range(seed, seed + 1), inf) for _ in range(2)] for seed in SEEDS[:8]]
    own = [[[each.counts[name] for name in ITS_OWN] for each in both] for both in twice]
    played = zip(twice, own, strict=True)
    return [[each.steps for each in both] for both, (once, again) in played if once == again and not once[0]]


def _slow(fixes: str) -> list[str]:
    """Begin a load and a store, then pause the server for some steps. Return the violated rules."""
    sizes = {"chunk_size": SERVER_CHUNK, "num_blocks": 28, "max_num_batched_tokens": 1024}
    with runner.applied(fixes == "fixed"):
        engine = late.LabEngine(Options(connector="mp", real_server=True, delay=5, **sizes))
        steps(
            [begin_load_and_store, do.server_stops(), do.step(2)],
            [do.admit(f"other {seed}", prompt(160, seed=seed), max_tokens=10) for seed in (2, 3)],
            [do.step(2), do.server_goes_on()],
            # wait here, so that the other requests still run when the transfers end, even on a slow host
            lambda engine: engine.connector.server.process.transfers_end(),
            [do.run(), do.settle()],
        )(engine)
        engine.connector.close()
    return sorted({found.code for found in engine.findings})


@pytest.fixture(scope="module")
def measured(outcomes: dict[str, Any]) -> dict[str, Any]:
    if "why" in outcomes:
        pytest.skip(f"no lmcache server here: {outcomes['why']}")
    return outcomes


def test_random_schedules_are_clean_and_have_tested_something(measured: dict[str, Any]) -> None:
    assert measured["violations"] == []
    assert measured["tested_nothing"] == ""
    happened = (
        "loads_failed", "evicted", "evicted_by_server", "read_from_disk", "server_restarts", "lookups_unanswered",
        "aborted_looking", "aborted_loading", "preemptions",
    )  # fmt: skip
    assert [what for what in happened if not measured["counts"][what]] == []


def test_a_seed_plays_alike_twice(measured: dict[str, Any]) -> None:
    assert len(measured["same"]) > 2
    assert all(once == again for once, again in measured["same"])


def test_a_slow_server_executes_transfers_after_their_timeout(measured: dict[str, Any]) -> None:
    assert "LAB001" in measured["slow"]["as released"]
    assert measured["slow"]["fixed"] == []


def test_a_restarted_server_has_the_chunks_on_its_disk(measured: dict[str, Any]) -> None:
    assert measured["sound"]["a_load_from_a_dead_server_counts_as_done"]["hits"]["again"] == 128


def test_a_full_server_has_evicted_the_first_chunks(measured: dict[str, Any]) -> None:
    assert measured["sound"]["what_the_server_has_evicted_counts_as_hit"]["hits"]["again"] == 0


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, measured: dict[str, Any]) -> None:
    assert measured["sound"][name]["found"] == []
    assert is_found(PLANTED[name], measured["faults"][name]), measured["faults"][name]["found"]
