"""The verdicts on a fix's functions decide whether kvfix applies the fix. These tests need no release of LMCache."""

from dataclasses import replace
from typing import Any

import pytest

from kvfix.applicability import Applicability, decide
from kvfix.fixes.record import Fix, Owner, Target
from kvfix.wrapping import after

OURS = Owner("vllm", "vllm.one", "One")
THEIRS = Owner("lmcache", "lmcache.two", "Two")


def target(owner: Owner, name: str, **more: Any) -> Target:
    return owner.target(name, broken=">=1", fix=lambda module: after(lambda *_: 0), **more)


FIRST, SECOND, HELPER = target(OURS, "first"), target(OURS, "second"), target(THEIRS, "helper", helper=True)
FIX = Fix(FIRST, SECOND, HELPER, effect="crash")

#: A value of OTHERS has a verdict on SECOND, and the expected state of FIX. FIRST and HELPER have the verdict `WRONG`.
WRONG = Applicability("applicable", "wrong", frozenset({"1", "2"}))
OTHERS = {
    "unknown code": (Applicability("unknown", "second is unknown"), "unknown"),
    "replaced or gone": (Applicability("refused", "second has gone"), "refused"),
    "right in a release that has the others": (Applicability("fixed-upstream", "", frozenset({"2"})), "applicable"),
    "right by the probe": (Applicability("fixed-upstream", "", None), "refused"),
    "of another release": (Applicability("applicable", "", frozenset({"3"})), "refused"),
    "absent in another release": (Applicability("not-affected", "", frozenset({"3"})), "refused"),
    "wrong by the probe": (Applicability("applicable", "", None), "applicable"),
}


def decided(fix: Fix, judged: dict[Target, Applicability]) -> list[tuple[str, set[Target]]]:
    found = decide(fix, lambda each: judged.get(each, WRONG))
    return [(decision.outcome.state, set(decision.wrapped)) for decision in found]


@pytest.mark.parametrize(("known", "state"), OTHERS.values(), ids=OTHERS)
def test_one_function_decides_for_all(known: Applicability, state: str) -> None:
    [(found, targets)] = decided(FIX, {SECOND: known})
    assert found == state
    wrong = {SECOND} if known.state == "applicable" else set()
    assert targets == ({FIRST, HELPER} | wrong if state == "applicable" else set())


def test_a_helper_counts_only_if_the_bug_is_there() -> None:
    unknown = Applicability("unknown", "helper is unknown")
    assert decided(FIX, {HELPER: unknown}) == [("unknown", set())]
    right = Applicability("not-affected", "", frozenset({"1"}))
    assert decided(FIX, {FIRST: right, SECOND: right, HELPER: unknown}) == [("not-affected", set())]


def test_a_release_of_each_distribution() -> None:
    """The release numbers of LMCache and vLLM are independent."""
    assert decided(FIX, {HELPER: WRONG._replace(releases=frozenset("7"))}) == [("applicable", {FIRST, SECOND, HELPER})]


def test_each_copy_of_the_code_is_decided_by_itself() -> None:
    copies = Fix(replace(FIRST, copy="a"), replace(SECOND, copy="b"), HELPER, effect="crash")
    first, second, helper = copies.targets
    refused = Applicability("refused", "second has gone")
    assert decided(copies, {second: refused}) == [("applicable", {first, helper}), ("refused", set())]
    assert decided(copies, {helper: refused}) == [("refused", set()), ("refused", set())]


def test_the_reason_names_the_function() -> None:
    (decision,) = decide(FIX, lambda each: WRONG if each is not SECOND else OTHERS["of another release"][0])
    assert "One." in decision.outcome.reason
    assert "no release of vllm has both One.second" in decision.outcome.reason
