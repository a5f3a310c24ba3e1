"""The lab finds that a fix lacks a target. (test_faults_in_fixes.py: a fix that fails.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvfix import catalogue
from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once
from tests.lab.faults import with_targets

OPTIONS = Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)


def shared(another_engine: bool = False) -> list[str]:
    """A load fails. `sharing` has 64 tokens of its prompt in vLLM, none in LMCache, and computes the rest in this step.

    The worker does not store it, and vLLM rolls it back to token 64.

    another_engine: another engine of the process has a request with the same id, whose load fails too.
    """
    with runner.applied(True):
        engine = late.LabEngine(OPTIONS)
        engine.store("first", prompt(160))
        engine.serve("before", prompt(64))
        engine.fail_load("failing")
        engine.take_blocks(OPTIONS.num_blocks - 6)
        engine.admit("failing", prompt(160))
        engine.step()
        engine.evict(6, forced=True)
        engine.free_blocks()
        engine.admit("sharing", prompt(112))
        while not engine.counts["loads_failed"]:
            engine.step()
        if another_engine:
            other = late.LabEngine(OPTIONS)
            other.do("stored_elsewhere", prompt(64))
            other.fail_load("sharing")
            other.serve("sharing", prompt(112))
            assert other.counts["loads_failed"]
        engine.run()
        engine.settle()
        return [str(found) for found in engine.findings]


def fails_again() -> list[str]:
    """The load of `r` fails, and would fail again when it is scheduled next."""
    with runner.applied(True):
        engine = late.LabEngine(Options(max_num_batched_tokens=512, async_scheduling=True))
        engine.store("first", prompt(192))
        engine.fail_load("r")
        engine.admit("r", prompt(193), max_tokens=4)
        engine.step(2)
        engine.fail_load("r")
        engine.run()
        engine.settle()
        return [*map(str, engine.findings), *(["a load has failed"] * engine.counts["loads_failed"])]


def of_scenario(slug: str) -> list[str]:
    scenario = find(slug)
    assert scenario is not None
    return [str(found) for found in runner.play(scenario, fixes=True).findings]


Targets = tuple[Any, ...]


def whole(targets: Targets) -> Targets:
    return targets


def without(function: str) -> Callable[[Targets], Targets]:
    return lambda targets: tuple(target for target in targets if not target.function.endswith(function))


def play_all() -> dict[str, list[str]]:
    """Return the findings with each fix, whole and incomplete."""
    found = {}
    for code, how, change, play in (
        ("KVF007", "", whole, shared),
        ("KVF007", " without the note", without("_update_requests_with_invalid_blocks"), shared),
        (
            "KVF007",
            " without its memory",
            without("get_block_ids_with_load_errors"),
            lambda: of_scenario("failed-load-stored-under-way"),
        ),
        ("KVF205", "", whole, fails_again),
        ("KVF205", " without the lookup", without("get_num_new_matched_tokens"), fails_again),
        (
            "KVF221",
            " without its tokens",
            without("_update_request_as_session"),
            lambda: of_scenario("preempted-session-lost"),
        ),
        # Last: it leaves notes.
        ("KVF007", " without what follows", without("build_connector_meta"), shared),
    ):
        fix = catalogue.find(code)
        assert fix is not None
        with with_targets(fix, change(fix.targets)):
            found[code + how] = play()
    return found


def test_whole(outcomes: dict[str, list[str]]) -> None:
    assert outcomes["KVF007"] == []
    assert outcomes["KVF205"] == ["a load has failed"]


def test_a_session_without_its_tokens(outcomes: dict[str, list[str]]) -> None:
    assert [each[:6] for each in outcomes["KVF221 without its tokens"]] == ["LAB008"]


@pytest.mark.parametrize("less", ["what follows", "the note"])
def test_a_half(outcomes: dict[str, list[str]], less: str) -> None:
    hole = "KVR007 store-leaves-hole sharing: tokens 64 to 112 are stored, the cache holds 0: 0 to 64 never are"
    assert outcomes[f"KVF007 without {less}"] == [hole]


def test_a_step_in_flight_that_is_saved(outcomes: dict[str, list[str]]) -> None:
    read = "LAB001 wrong-content r: the step reads token 192 of 326 computed ones, its slot holds other KV"
    assert read in outcomes["KVF007 without its memory"]


def test_a_failed_load_that_is_tried_again(outcomes: dict[str, list[str]]) -> None:
    """It fails again, and then vLLM computes: it must not be tried for ever."""
    *wrong, first, second = outcomes["KVF205 without the lookup"]
    assert first == second == "a load has failed"
    assert any(each.startswith("LAB008 wrong-text r: token") for each in wrong)


def test_another_engine_in_the_process_takes_nothing_away(once: Once) -> None:
    """Notes on a request belong to one scheduler: the other scheduler has a request with the same id."""
    assert once(shared, RELEASES / "0.5.6", True) == []
