"""Fixes with functions in two processes: each half alone has no outcome that the release does not have.

A load that times out, where the release waits for ever, is allowed. One process may have the fix, and the other process
another release or no kvfix.
"""

from __future__ import annotations

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
from tests.lab.faults import CLOSED, Case, cases, with_targets

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

    def findings(fixes: bool, _: str) -> Any:
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
        assert fix is not None
        found[fix.code] = []
        for case in cases(fix) + [failed_store(connector) for connector in STORES.get(fix.code, ())]:
            released = {*CLOSED, *(each.code for each in case.released())}
            for targets in halves(fix):
                # a helper alone does not show the bug: each function counts
                with with_targets(fix, tuple(replace(each, helper=False) for each in targets)):
                    new = [str(each) for each in case.fixed() if each.code not in released]
                found[fix.code] += [f"{case.name} with {targets[0].function}: {each}" for each in new]
    return found


@pytest.mark.parametrize("code", FIXES)
def test_one_half(code: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[code] == []
