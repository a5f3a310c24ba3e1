"""If a fix is applied without one of its targets, the lab finds the bug.

The other process may have no kvfix. So if a fix wraps functions in two processes, each half alone must not add a
finding to those of the release. A load may time out where the release waits for ever.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from kvfix import catalogue
from kvfix.fixes.record import Fix, Target
from kvfix_tools.lab import runner
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find, scenario
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers
from tests.lab.faults import CLOSED, Case, cases, of_scenario
from tests.lab.planted import counted, steps, until

#: Functions of connectors that run in a worker. Other functions run in a worker if their class is named after one.
IN_WORKER = {
    "wait_for_save", "start_load_kv", "save_kv_layer", "get_block_ids_with_load_errors", "get_finished",
    "get_transfer_results", "handle_preemptions",
}  # fmt: skip
#: {fix that also reports failed stores, which no scenario plays: connectors}
STORES = {"KVF330": ["offloading"], "KVF370": ["simple-offload"]}
#: {fix for prefill and decode: its functions that act in the prefill engine}
IN_PREFILL = {"KVF319": {"request_finished"}, "KVF322": {"_do_start_push_kv"}}


def _is_in_worker(target: Target) -> bool:
    owner, _, function = target.function.rpartition(".")
    return ("Worker" in owner and "Metadata" not in owner) or function in IN_WORKER or "Backend" in owner


def halves(fix: Fix) -> list[tuple[Target, ...]]:
    """Return the targets of each half of a fix, or [] if all its functions run in one process."""
    if fix.code in IN_PREFILL:
        first = tuple(each for each in fix.targets if each.function.rpartition(".")[2] in IN_PREFILL[fix.code])
    else:
        first = tuple(each for each in fix.targets if _is_in_worker(each))
    rest = tuple(each for each in fix.targets if each not in first)
    return [first, rest] if first and rest else []


FIXES = [fix.code for fix in catalogue.fixes() if fix.scenarios and halves(fix)]


def failed_store(connector: str) -> Case:
    """Return a case in which a store fails, and then a request with the same prompt comes."""
    options = Options(connector=connector, max_num_batched_tokens=512)
    before = [do.fail_store("before"), do.serve("before", prompt(128)), do.settle(), do.reset_prefix_cache()]
    return of_scenario(scenario(before, do.serve("r", prompt(128)), shows="", options=options, name="failed-store"))


def play_all() -> dict[str, list[str]]:
    """Return {fix: findings with one half of the fix that do not occur without the fix}."""
    found: dict[str, list[str]] = {}
    for fix in map(catalogue.find, FIXES):
        found[fix.code] = []
        for case in cases(fix) + [failed_store(connector) for connector in STORES.get(fix.code, ())]:
            released = {*CLOSED, *(each.code for each in case.findings(False))}
            for targets in halves(fix):
                # kvfix would not apply a half that has only helpers, so count each function as one with the bug
                with mock.patch.dict(vars(fix), targets=tuple(replace(each, helper=False) for each in targets)):
                    new = [str(each) for each in case.findings() if each.code not in released]
                found[fix.code] += [f"{case.name} with {targets[0].function}: {each}" for each in new]
    return found


@pytest.mark.parametrize("code", FIXES)
def test_one_half(code: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[code] == []


OPTIONS = Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)


def found(options: Options, *parts: Any) -> list[str]:
    """Play these parts of a schedule with the fixes. Return the findings, and the text FAILED for each failed load."""
    with runner.applied(True):
        engine = late.LabEngine(options)
        steps(*parts, do.run(), do.settle())(engine)
        return [*map(str, engine.findings), *(["a load has failed"] * engine.counts["loads_failed"])]


def other_fails(_: Any) -> None:
    """In another engine of this process, let the load of a request with the id `sharing` fail."""
    other = [do.stored_elsewhere(prompt(64)), do.fail_load("sharing"), do.serve("sharing", prompt(112))]
    steps(other, counted("loads_failed", 1))(late.LabEngine(OPTIONS))


def shared(*parts: Any) -> list[str]:
    """Play a step with a failed load that also computes `sharing` after token 64. vLLM has the 64 tokens, LMCache none.

    The worker does not store the computed tokens, and vLLM rolls `sharing` back to token 64. parts: the next steps.
    """
    findings = found(
        OPTIONS,
        [do.store("first", prompt(160)), do.serve("before", prompt(64)), do.fail_load("failing")],
        [do.take_blocks(OPTIONS.num_blocks - 6), do.admit("failing", prompt(160)), do.step()],
        [do.evict(6, forced=True), do.free_blocks(), do.admit("sharing", prompt(112))],
        [until(lambda engine: engine.counts["loads_failed"]), *parts],
    )
    return [each for each in findings if each != "a load has failed"]


def fails_again() -> list[str]:
    """Play a failed load of `r`. A second load of `r` would fail too."""
    return found(
        Options(max_num_batched_tokens=512, async_scheduling=True),
        [do.store("first", prompt(192)), do.fail_load("r"), do.admit("r", prompt(193), max_tokens=4)],
        [do.step(2), do.fail_load("r")],
    )


def without(code: str, function: str, play: Callable[[], Any]) -> list[str]:
    """Play with this fix, but without one of its functions ("": with all). Return the findings."""
    fix: Any = catalogue.find(code)
    left = [each for each in fix.targets if not function or not each.function.endswith(function)]
    with mock.patch.dict(vars(fix), targets=tuple(left)):
        return [str(found) for found in play()]


FAILED = "a load has failed"
HOLE = "KVR007 store-leaves-hole sharing: tokens 64 to 112 are stored, the cache holds 0: 0 to 64 never are"
SAVED = "LAB001 wrong-content r: the step reads token 192 of 326 computed ones, its slot holds other KV"
#: (fix, the target to leave out or "", the case to play, starts of the findings). The last case leaves notes behind.
INCOMPLETE: list[tuple[str, str, Callable[[], Any], tuple[str, ...]]] = [
    ("KVF007", "", shared, ()),
    ("KVF007", "_update_requests_with_invalid_blocks", shared, (HOLE,)),
    ("KVF007", "get_block_ids_with_load_errors", of_scenario(find("failed-load-stored-under-way")).findings, (SAVED,)),
    ("KVF205", "", fails_again, (FAILED,)),
    # the second load fails too. Then vLLM must compute the tokens, and not load for ever
    ("KVF205", "get_num_new_matched_tokens", fails_again, ("LAB008 wrong-text r: token", FAILED, FAILED)),
    ("KVF221", "_update_request_as_session", of_scenario(find("preempted-session-lost")).findings, ("LAB008",)),
    ("KVF007", "build_connector_meta", shared, (HOLE,)),
]
#: Targets without which there are more findings than those listed.
WITH_OTHERS = ("get_block_ids_with_load_errors", "get_num_new_matched_tokens")


def incomplete() -> list[list[str]]:
    return [without(*each[:3]) for each in INCOMPLETE]


@pytest.mark.parametrize("number", range(len(INCOMPLETE)), ids=lambda number: "-".join(INCOMPLETE[number][:2]))
def test_a_missing_target_is_found(number: int, once: Once) -> None:
    findings, (_, target, _, beginnings) = once(incomplete, RELEASES / "0.5.6")[number], INCOMPLETE[number]
    assert findings.count(FAILED) == beginnings.count(FAILED)
    assert [each for each in beginnings if not any(text.startswith(each) for text in findings)] == []
    assert len(findings) == len(beginnings) or target in WITH_OTHERS


@answers([])
def test_another_engine_in_the_process_changes_no_notes() -> list[str]:
    """A fix keeps notes for each scheduler, because another scheduler may have a request with the same id."""
    return shared(other_fails)
