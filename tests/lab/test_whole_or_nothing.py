"""kvfix applies a fix whole or not at all.

The test replaces each function of a fix in turn, as a site patch or a later release would do. Then kvfix must wrap no
other function of the fix, and the fix's scenarios must have the same outcomes as without fixes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import FunctionType
from typing import Any
from unittest import mock

import kvfix
from kvfix import applicability, catalogue, installed_source
from kvfix.fixes import stubs
from kvfix.fixes.record import Fix, Target
from kvfix.session import session
from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import find


@contextmanager
def replaced(fix: Fix, target: Target) -> Iterator[None]:
    """Replace the target by an equal function with another file name. Its behaviour probe gives no answer."""
    found = installed_source.live_function(import_module(target.module), target.function)
    owner, name, original = found
    is_static = isinstance(original, staticmethod)
    inner = original.__func__ if is_static else original
    code = inner.__code__.replace(co_filename="/site/patched.py")
    other = FunctionType(code, inner.__globals__, name, inner.__defaults__, inner.__closure__)
    other.__kwdefaults__, other.__module__ = inner.__kwdefaults__, "site_patch"
    same = [replace(each, probe=stubs.cannot_tell) if each.name == target.name else each for each in fix.targets]
    with (
        mock.patch.object(owner, name, staticmethod(other) if is_static else other),
        mock.patch.dict(vars(fix), targets=tuple(same)),
    ):
        yield


def of_several_functions() -> Iterator[tuple[Fix, str, tuple[Target, ...]]]:
    """Yield fixes that wrap several functions of one copy. Those with scenarios come last: the lab replaces a class."""
    for fix in sorted(catalogue.fixes(), key=lambda each: bool(each.scenarios)):
        for copy, targets in fix.groups if fix.fixable else ():
            wrong = [each for each in targets if applicability.judge(each).state == "applicable"]
            if len(wrong) > 1 and any(not each.helper for each in wrong):
                yield fix, copy, tuple(wrong)


#: {copy of the code: the lab's connector that has this copy}
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


def play_all() -> dict[str, Any]:
    """Return {fix and replaced function: [functions still wrapped, scenarios whose outcome the fix still changes]}.

    For each copy of the code, also return the functions that the fix wraps when no function is replaced.
    """
    found: dict[str, Any] = {}
    every = list(of_several_functions())
    for fix, copy, wrong in every:
        # If the code has another copy, kvfix still wraps that copy, and the functions that all copies share.
        is_only_copy = sum(each[0] is fix for each in every) == 1
        for target in wrong:
            import_module(target.module)
        with runner.quiet():
            kvfix.apply(only=[fix.code])
            found[f"{fix.code} {copy} whole"] = wrapped(fix, wrong)
            kvfix.revert()
        as_released = played(fix, copy, fixes=False)
        for target in wrong:
            with replaced(fix, target):
                with runner.quiet():
                    kvfix.apply(only=[fix.code])
                    own = [each for each in wrong if is_only_copy or target.copy in ("", each.copy)]
                    others = wrapped(fix, own)
                    states = {row.verdict for row in kvfix.status() if row.code == fix.code}
                    named = [row.reason for row in kvfix.status() if target.function in row.reason]
                    kvfix.revert()
                others = [*others, *([] if named and "refused" in states else [f"status says {states}"])]
                now = played(fix, copy, fixes=True)
                found[f"{fix.code} {target.name}"] = [others, [each for each in now if each not in as_released]]
    return found


def wrapped(fix: Fix, targets: Iterable[Target]) -> list[str]:
    keys = [target for target in targets if fix.code in session.wrapped.get((target.module, target.function), ())]
    return sorted({target.name for target in keys})


def test_no_half_of_a_fix_is_applied(outcomes: dict[str, Any]) -> None:
    trials = {name: each for name, each in outcomes.items() if not name.endswith(" whole")}
    assert len(trials) > 60
    assert {name: each for name, each in trials.items() if each != [[], []]} == {}


def test_without_a_replaced_function_all_are_wrapped(outcomes: dict[str, Any]) -> None:
    whole = {name: each for name, each in outcomes.items() if name.endswith(" whole")}
    assert len(whole) > 20
    assert all(whole.values())
