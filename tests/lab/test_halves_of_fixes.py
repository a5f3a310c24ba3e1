"""kvfix applies a fix to all its target functions, or to none. If one function is left out, the lab finds the bug.

Some fixes wrap functions in two processes, and one process may run without kvfix. Half of a fix must cause no new
findings, except of the rules in CLOSED (faults.py). For example, a load may time out instead of waiting for ever.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any
from unittest import mock

import pytest

import kvfix
from kvfix import applicability, catalogue, installed_source
from kvfix.fixes.record import Fix, Target
from kvfix.session import session
from kvfix_tools.lab import runner
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find, scenario
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers
from tests.lab.faults import CLOSED, Case, cases, of_scenario
from tests.lab.planted import counted, steps, until

#: Functions of connectors that run in a worker. For other functions, `_is_in_worker` decides by the class name.
IN_WORKER = {
    "wait_for_save", "start_load_kv", "save_kv_layer", "get_block_ids_with_load_errors", "get_finished",
    "get_transfer_results", "handle_preemptions",
}  # fmt: skip
#: Fixes that also report failed stores, and the connectors to play. No scenario has failed stores.
STORES = {"KVF330": ["offloading"], "KVF370": ["simple-offload"]}
#: Fixes for prefill and decode, and the functions of each fix that act in the prefill engine.
IN_PREFILL = {"KVF319": {"request_finished"}, "KVF322": {"_do_start_push_kv"}}


def _is_in_worker(target: Target) -> bool:
    owner, _, function = target.function.rpartition(".")
    return ("Worker" in owner and "Metadata" not in owner) or function in IN_WORKER or "Backend" in owner


def halves(fix: Fix) -> list[tuple[Target, ...]]:
    """Return the targets of each half of a fix, or [] if all targets run in one process."""
    if fix.code in IN_PREFILL:
        first = tuple(each for each in fix.targets if each.function.rpartition(".")[2] in IN_PREFILL[fix.code])
    else:
        first = tuple(each for each in fix.targets if _is_in_worker(each))
    rest = tuple(each for each in fix.targets if each not in first)
    return [first, rest] if first and rest else []


FIXES = [fix.code for fix in catalogue.fixes() if fix.scenarios and halves(fix)]


def failed_store(connector: str) -> Case:
    options = Options(connector=connector, max_num_batched_tokens=512)
    before = [do.fail_store("before"), do.serve("before", prompt(128)), do.settle(), do.reset_prefix_cache()]
    return of_scenario(scenario(before, do.serve("r", prompt(128)), shows="", options=options, name="failed-store"))


def play_all() -> dict[str, list[str]]:
    """Return for each fix the findings that occur with one half of the fix, but not without the fix."""
    found: dict[str, list[str]] = {}
    for fix in map(catalogue.find, FIXES):
        found[fix.code] = []
        for case in cases(fix) + [failed_store(connector) for connector in STORES.get(fix.code, ())]:
            released = {*CLOSED, *(each.code for each in case.findings(False))}
            for targets in halves(fix):
                # kvfix would not apply a half that has only helpers, so declare that no target is a helper
                with mock.patch.dict(vars(fix), targets=tuple(replace(each, helper=False) for each in targets)):
                    new = [str(each) for each in case.findings() if each.code not in released]
                found[fix.code] += [f"{case.name} with {targets[0].function}: {each}" for each in new]
    return found


@pytest.mark.parametrize("code", FIXES)
def test_one_half(code: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[code] == []


OPTIONS = Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)


def found(options: Options, *parts: Any) -> list[str]:
    """Play these parts of a schedule with the fixes. Return the findings, and FAILED once for each failed load."""
    with runner.applied(True):
        engine = late.LabEngine(options)
        steps(*parts, do.run(), do.settle())(engine)
        return [*map(str, engine.findings), *([FAILED] * engine.counts["loads_failed"])]


def other_fails(_: Any) -> None:
    """Let a load fail in a second engine of this process. Both engines have a request with the id `sharing`."""
    other = [do.stored_elsewhere(prompt(64)), do.fail_load("sharing"), do.serve("sharing", prompt(112))]
    steps(other, counted("loads_failed", 1))(late.LabEngine(OPTIONS))


def shared(*parts: Any) -> list[str]:
    """Let `failing`'s load fail while a step computes `sharing` from token 64 on. Only vLLM has the first 64 tokens."""
    findings = found(
        OPTIONS,
        [do.store("first", prompt(160)), do.serve("before", prompt(64)), do.fail_load("failing")],
        [do.take_blocks(OPTIONS.num_blocks - 6), do.admit("failing", prompt(160)), do.step()],
        [do.evict(6, forced=True), do.free_blocks(), do.admit("sharing", prompt(112))],
        [until(lambda engine: engine.counts["loads_failed"]), *parts],
    )
    return [each for each in findings if each != FAILED]


def fails_again() -> list[str]:
    """Let the load of `r` fail. If `r` loads a second time, let the second load fail too."""
    return found(
        Options(max_num_batched_tokens=512, async_scheduling=True),
        [do.store("first", prompt(192)), do.fail_load("r"), do.admit("r", prompt(193), max_tokens=4)],
        [do.step(2), do.fail_load("r")],
    )


def without(code: str, function: str, play: Callable[[], Any]) -> list[str]:
    """Play with this fix, but leave out one of its functions ("": leave out none). Return the findings."""
    fix: Any = catalogue.find(code)
    left = [each for each in fix.targets if not function or not each.function.endswith(function)]
    with mock.patch.dict(vars(fix), targets=tuple(left)):
        return [str(found) for found in play()]


FAILED = "a load has failed"
HOLE = (
    "KVR007 store-leaves-hole sharing: tokens 64 to 112 are stored, but the cache holds only 0 tokens, so tokens 0 to "
    "64 are never stored"
)
SAVED = "LAB001 wrong-content r: the step reads token 192 of 326 computed ones, its slot holds other KV"
#: (fix, target to leave out or "", case to play, beginnings of the expected findings).
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
#: If one of these targets is left out, the lab has more findings than INCOMPLETE lists.
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


@contextmanager
def replaced(fix: Fix, target: Target) -> Iterator[None]:
    """Replace the target by an equal function with another file name. Give the target no behaviour probe."""
    owner, name, original = installed_source.live_function(import_module(target.module), target.function)
    is_static = isinstance(original, staticmethod)
    inner = original.__func__ if is_static else original
    code = inner.__code__.replace(co_filename="/site/patched.py")
    other = FunctionType(code, inner.__globals__, name, inner.__defaults__, inner.__closure__)
    other.__kwdefaults__, other.__module__ = inner.__kwdefaults__, "site_patch"
    same = [replace(each, probe=None) if each.name == target.name else each for each in fix.targets]
    with (
        mock.patch.object(owner, name, staticmethod(other) if is_static else other),
        mock.patch.dict(vars(fix), targets=tuple(same)),
    ):
        yield


def of_several_functions() -> Iterator[tuple[Fix, str, tuple[Target, ...]]]:
    """Yield (fix, copy of the code, broken targets). Scenarios replace classes, so fixes with scenarios come last."""
    for fix in sorted(catalogue.fixes(), key=lambda each: bool(each.scenarios)):
        for copy, targets in fix.groups if fix.fixable else ():
            wrong = [each for each in targets if applicability.judge(each).state == "applicable"]
            if len(wrong) > 1 and any(not each.helper for each in wrong):
                yield fix, copy, tuple(wrong)


#: The lab's connector for each package that has a copy of the multi-process connector.
CONNECTORS = {"LMCache": "mp", "vLLM": "mp-in-tree"}


def played(fix: Fix, copy: str, fixes: bool) -> list[tuple[str, str]]:
    """Return (slug, outcome) of each scenario of the fix that plays this copy of the code."""
    return [
        (scenario.slug, runner.play(scenario, fixes, only=[fix.code]).outcome)
        for scenario in map(find, fix.scenarios)
        if scenario is not None
        and runner.expected(scenario) != "not-applicable"
        and scenario.options.connector == CONNECTORS.get(copy, scenario.options.connector)
    ]


def play_replaced() -> dict[str, Any]:
    """Replace one function at a time. Return the functions that kvfix still wraps, and scenarios with a new outcome."""
    found: dict[str, Any] = {}
    every = list(of_several_functions())
    for fix, copy, wrong in every:
        # If the code has another copy, kvfix still wraps that copy, and the functions that all copies share.
        is_only_copy = sum(each[0] is fix for each in every) == 1
        for target in wrong:
            import_module(target.module)
        with runner.applied(True, only=[fix.code]):
            found[f"{fix.code} {copy} whole"] = wrapped(fix, wrong)
        as_released = played(fix, copy, fixes=False)
        for target in wrong:
            with replaced(fix, target):
                with runner.applied(True, only=[fix.code]):
                    others = wrapped(fix, [each for each in wrong if is_only_copy or target.copy in ("", each.copy)])
                    states = {row.verdict for row in kvfix.status() if row.code == fix.code}
                    named = [row.reason for row in kvfix.status() if target.function in row.reason]
                others = [*others, *([] if named and "refused" in states else [f"status says {states}"])]
                now = played(fix, copy, fixes=True)
                found[f"{fix.code} {target.name}"] = [others, [each for each in now if each not in as_released]]
    return found


def wrapped(fix: Fix, targets: Iterable[Target]) -> list[str]:
    keys = [target for target in targets if fix.code in session.wrapped.get((target.module, target.function), ())]
    return sorted({target.name for target in keys})


def test_without_a_function_no_half_of_a_fix_is_applied(once: Once) -> None:
    found = once(play_replaced, RELEASES / "0.5.6")
    whole = {name: each for name, each in found.items() if name.endswith(" whole")}
    assert len(whole) > 20
    assert all(whole.values())
    trials = {name: each for name, each in found.items() if name not in whole}
    assert len(trials) > 60
    assert {name: each for name, each in trials.items() if each != [[], []]} == {}
