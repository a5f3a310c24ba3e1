"""The state of each fix in this process, for `kvfix status`, reports and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix import applicability, catalogue, installed_source
from kvfix.applicability import STATES, Applicability
from kvfix.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvfix.fixes.api import Fix, Target
    from kvfix.ledger import Finding


class FixRow(NamedTuple):
    """The state of a fix in a distribution. version: "" if not known. verdict: one of STATES (its key in `--json`)."""

    code: str
    slug: str
    dist: str
    version: str
    verdict: str
    reason: str


def rows(judge: Callable[[Target], Applicability] = applicability.judge) -> list[FixRow]:
    """One row for each fix and distribution. An outcome in this process takes precedence over `judge`."""
    return [row for fix in catalogue.fixes() for row in rows_of(fix, judge)]


def rows_of(fix: Fix, judge: Callable[[Target], Applicability] = applicability.judge) -> Iterator[FixRow]:
    """One row for each distribution of this fix."""
    for dist in fix.dists:
        targets = [target for target in fix.targets if target.dist == dist]
        state, reason = _worst([target for target in targets if not target.helper], judge)
        if state in ("applicable", "applied"):  # it needs its helpers
            helpers = _worst([target for target in targets if target.helper], judge)
            if helpers.state in ("failed", "unknown"):
                state, reason = helpers
        if state == "applicable" and not fix.fixable:
            state, reason = _unfixable(fix, reason)
        if state == "applicable" and session.config is not None and not session.config.takes(fix.code, fix.opt_in):
            reason += "; switched off by the configuration " + repr(str(session.config))
        yield FixRow(fix.code, fix.slug, dist, installed_source.version(dist), state, reason)


def _worst(targets: list[Target], judge: Callable[[Target], Applicability]) -> Applicability:
    found = [session.outcomes.get(target) or judge(target) for target in targets]
    return min(found, key=lambda each: STATES.index(each.state), default=Applicability("not-affected", ""))


def handling(finding: Finding) -> list[FixRow]:
    """Rows of the fixes for this finding that are applied here, can be applied, have failed, or are unknown."""
    return [
        row
        for fix in catalogue.handling(finding.code, finding.message)
        for row in rows_of(fix)
        if row.verdict in ("applied", "applicable", "failed", "unknown")
    ]


def _unfixable(fix: Fix, reason: str) -> Applicability:
    """The state of a bug that is there and that no wrapper can fix."""
    harmless = fix.harmless()
    if harmless:
        return Applicability("not-affected", f"{reason}; {harmless}")
    first = " ".join(fix.section("Workaround").partition("\n\n")[0].split())
    return Applicability("failed", f"{reason}, and cannot be fixed from outside: {first}")
