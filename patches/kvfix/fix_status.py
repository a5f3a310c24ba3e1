"""The state of each fix in this process, for `kvfix status`, reports and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix import applicability, catalogue, installed_source
from kvfix.applicability import STATES, Applicability, Decision
from kvfix.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvfix.fixes.record import Fix, Target
    from kvfix.ledger import Finding


class FixRow(NamedTuple):
    """The state of a fix in a distribution. version: "" if not known. verdict: one of STATES, as in `--json`."""

    code: str
    slug: str
    dist: str
    version: str
    verdict: str
    reason: str


def rows(judge: Callable[[Target], Applicability] = applicability.judge) -> list[FixRow]:
    """Return one row for each fix and distribution. `session.judged` takes precedence over `judge`."""
    return [row for fix in catalogue.fixes() for row in rows_of(fix, judge)]


def rows_of(fix: Fix, judge: Callable[[Target], Applicability] = applicability.judge) -> Iterator[FixRow]:
    """Yield one row for each distribution of this fix. If the code has several copies, take the worst state."""
    decisions = applicability.decide(fix, lambda target: session.judged.get(target) or judge(target))
    for dist in fix.dists:
        outcomes = [_outcome(fix, decision) for decision in decisions if dist in decision.dists]
        if any(each.state == "applied" for each in outcomes):  # another copy may be applied when it is imported
            outcomes = [each for each in outcomes if each.state != "applicable"]
        state, reason, _ = min(outcomes, key=lambda each: STATES.index(each.state))
        yield FixRow(fix.code, fix.slug, dist, installed_source.version(dist), state, reason)


def _outcome(fix: Fix, decision: Decision) -> Applicability:
    """Return the state of these functions of the fix in this process."""
    if decision.outcome.state != "applicable":
        return decision.outcome
    if not fix.fixable:
        return _unfixable(fix, decision.outcome.reason)
    states = {session.outcomes[target].state for target in decision.wrapped if target in session.outcomes}
    if "applied" in states:
        return decision.outcome._replace(state="applied")
    taken = session.config is not None and session.config.takes(fix.code, fix.opt_in)
    if fix.opt_in and not taken:
        return decision.outcome._replace(state="opt-in")
    if session.config is not None and not taken:
        reason = f"{decision.outcome.reason}; switched off by the configuration {str(session.config)!r}"
        return decision.outcome._replace(reason=reason)
    return decision.outcome


def handling(finding: Finding) -> list[FixRow]:
    """Return the rows of the fixes for this finding, without those that this process does not need."""
    return [
        row
        for fix in catalogue.handling(finding.code, finding.message)
        for row in rows_of(fix)
        if row.verdict in ("applied", "applicable", "opt-in", "refused", "unknown", "unfixable")
    ]


def _unfixable(fix: Fix, reason: str) -> Applicability:
    """Return the state of a bug that the installed code has and that no wrapper can fix."""
    harmless = fix.harmless()
    if harmless:
        return Applicability("not-affected", f"{reason}; {harmless}")
    first = " ".join(fix.section("Workaround").partition("\n\n")[0].split())
    return Applicability("unfixable", f"{reason}, and cannot be fixed from outside: {first}")
