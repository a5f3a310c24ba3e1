"""Fixes that lack targets: the lab finds that a target is missing.

Fixes with functions in two processes: each half alone has no outcome that the release does not have. A load that times
out, where the release waits for ever, is allowed. One process may have the fix, and the other process another release
or no kvfix.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kvfix import catalogue
from kvfix.fixes.record import Fix, Target
from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers
from tests.lab.faults import CLOSED, Case, cases, of_scenario, with_targets

#: Functions of connectors that run in a worker. Classes of workers have "Worker" in their name.
IN_WORKER = {
    "wait_for_save", "start_load_kv", "save_kv_layer", "get_block_ids_with_load_errors", "get_finished",
    "get_transfer_results", "handle_preemptions",
}  # fmt: skip
#: Fixes that also report failed stores, which no scenario plays.
STORES = {"KVF330": ["offloading"], "KVF370": ["simple-offload"]}
#: Of the fixes for two engines: the functions that act in the prefill engine.
IN_PREFILL = {"KVF319": {"request_finished"}, "KVF322": {"_do_start_push_kv"}}


def _is_in_worker(target: Target) -> bool:
    owner, _, function = target.function.rpartition(".")
    return ("Worker" in owner and "Metadata" not in owner) or function in IN_WORKER or "Backend" in owner


def halves(fix: Fix) -> list[tuple[Target, ...]]:
    """The targets of each half; none if all functions run in one process."""
    if fix.code in IN_PREFILL:
        first = tuple(each for each in fix.targets if each.function.rpartition(".")[2] in IN_PREFILL[fix.code])
    else:
        first = tuple(each for each in fix.targets if _is_in_worker(each))
    rest = tuple(each for each in fix.targets if each not in first)
    return [first, rest] if first and rest else []


FIXES = [fix.code for fix in catalogue.fixes() if fix.scenarios and halves(fix)]


def failed_store(connector: str) -> Case:
    """A store fails, and another request has the same prompt."""

    def findings(fixes: bool = True) -> Any:
        with runner.applied(fixes), suppress(late.EngineDied):
            engine = late.LabEngine(Options(connector=connector, max_num_batched_tokens=512))
            engine.do("fail_store", "before")
            engine.serve("before", prompt(128))
            engine.settle()
            engine.reset_prefix_cache()
            engine.serve("r", prompt(128))
        return engine.findings

    return Case("failed-store", findings)


def play_all() -> dict[str, list[str]]:
    """Return {fix: findings with one half of the fix, and not as released}."""
    found: dict[str, list[str]] = {}
    for fix in map(catalogue.find, FIXES):
        found[fix.code] = []
        for case in cases(fix) + [failed_store(connector) for connector in STORES.get(fix.code, ())]:
            released = {*CLOSED, *(each.code for each in case.findings(False))}
            for targets in halves(fix):
                # a helper alone does not show the bug: each function counts
                with with_targets(fix, tuple(replace(each, helper=False) for each in targets)):
                    new = [str(each) for each in case.findings() if each.code not in released]
                found[fix.code] += [f"{case.name} with {targets[0].function}: {each}" for each in new]
    return found


@pytest.mark.parametrize("code", FIXES)
def test_one_half(code: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[code] == []


# ---------------------------------------------------------------------- incomplete fixes

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


def without(code: str, function: str, play: Callable[[], Any]) -> list[str]:
    """Return the findings of a play with this fix without this function. "": with the whole fix."""
    fix: Any = catalogue.find(code)
    left = [each for each in fix.targets if not function or not each.function.endswith(function)]
    with with_targets(fix, tuple(left)):
        return [str(found) for found in play()]


def incomplete() -> dict[str, list[str]]:
    session, in_flight = (of_scenario(slug) for slug in ("preempted-session-lost", "failed-load-stored-under-way"))
    return {
        "KVF007": without("KVF007", "", shared),
        "no note": without("KVF007", "_update_requests_with_invalid_blocks", shared),
        "no memory": without("KVF007", "get_block_ids_with_load_errors", in_flight.findings),
        "KVF205": without("KVF205", "", fails_again),
        "no lookup": without("KVF205", "get_num_new_matched_tokens", fails_again),
        "no tokens": without("KVF221", "_update_request_as_session", session.findings),
        # Last: it leaves notes.
        "nothing that follows": without("KVF007", "build_connector_meta", shared),
    }


HOLE = "KVR007 store-leaves-hole sharing: tokens 64 to 112 are stored, the cache holds 0: 0 to 64 never are"


@pytest.mark.parametrize(
    ("less", "first"),
    [
        ("KVF007", ""), ("KVF205", "a load has failed"), ("no tokens", "LAB008"), ("no note", HOLE),
        ("nothing that follows", HOLE),
    ],
)  # fmt: skip
def test_it_is_found_that_a_target_is_missing(less: str, first: str, once: Once) -> None:
    found = once(incomplete, RELEASES / "0.5.6")[less]
    assert [each[: len(first)] for each in found] == [first] * bool(first)


def test_a_step_in_flight_that_is_saved(once: Once) -> None:
    read = "LAB001 wrong-content r: the step reads token 192 of 326 computed ones, its slot holds other KV"
    assert read in once(incomplete, RELEASES / "0.5.6")["no memory"]


def test_a_failed_load_that_is_tried_again(once: Once) -> None:
    """It fails again, and then vLLM computes: it must not be tried for ever."""
    *wrong, first, second = once(incomplete, RELEASES / "0.5.6")["no lookup"]
    assert first == second == "a load has failed"
    assert any(each.startswith("LAB008 wrong-text r: token") for each in wrong)


@answers([])
def test_another_engine_in_the_process_takes_nothing_away() -> list[str]:
    """Notes on a request belong to one scheduler: the other scheduler has a request with the same id."""
    return shared(another_engine=True)
