"""Decides whether a fix is applied: all of its functions or none. Pure: the caller passes the verdict on each function.

A fix may have several groups of functions, one for each copy of the same code (`Owner.copy`): LMCache's multi-process
connector and vLLM's copy of it, for instance. Each group is decided by itself. A group is refused if one of its
functions is unknown, missing or cannot be wrapped, or if no release has all of its functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix.applicability import STATES, Applicability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvfix.fixes.record import Fix, Target

    Judge = Callable[[Target], Applicability]


class Decision(NamedTuple):
    """The decision for one group of a fix. outcome: the state of all its functions. targets: the functions to wrap."""

    copy: str
    outcome: Applicability
    targets: tuple[Target, ...]
    dists: tuple[str, ...]


def decide(fix: Fix, judge: Judge) -> list[Decision]:
    return [_decide(copy, targets, {target: judge(target) for target in targets}) for copy, targets in fix.groups]


def _decide(copy: str, targets: tuple[Target, ...], judged: dict[Target, Applicability]) -> Decision:
    faulty = [target for target in targets if not target.helper]
    dists = tuple(dict.fromkeys(target.dist for target in faulty))
    outcome = _worst(faulty, judged)
    if outcome.state == "applicable":
        outcome = _obstacle(targets, judged) or outcome
    wrapped = [target for target in targets if judged[target].state == "applicable" and outcome.state == "applicable"]
    return Decision(copy, outcome, tuple(wrapped), dists)


def _worst(targets: Iterable[Target], judged: dict[Target, Applicability]) -> Applicability:
    found = [judged[target] for target in targets]
    return min(found, key=lambda each: STATES.index(each.state), default=Applicability("not-affected", ""))


def _obstacle(targets: tuple[Target, ...], judged: dict[Target, Applicability]) -> Applicability | None:
    """Return why a group with a wrong function is refused; None if the fix can be applied."""
    worst = _worst(targets, judged)
    if worst.state in ("refused", "unknown"):
        return worst
    for target in targets:
        if judged[target].state == "fixed-upstream" and judged[target].releases is None:
            return Applicability("refused", f"{target.function} is right, but other functions of the fix have the bug")
    for dist in {target.dist for target in targets}:
        known = [(target, judged[target].releases) for target in targets if target.dist == dist]
        common: frozenset[str] | None = None
        for target, releases in known:
            if releases is None:  # the probe has judged this function
                continue
            common = releases if common is None else common & releases
            if not common:
                return Applicability(
                    "refused", f"no release of {dist} has both {target.function} and the other functions of the fix"
                )
    return None
