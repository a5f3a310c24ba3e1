"""List the fixes, the state of each fix in this process, and the fixes for a finding (`kvfix.ledger.Finding`)."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kvfix import applicability, engine_log, installed_source
from kvfix import fixes as folder
from kvfix.applicability import STATES, Applicability, Decision
from kvfix.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvfix.fixes.record import Fix, Target
    from kvfix.ledger import Finding

#: Advice for the user if kvfix finds no fix in its own files.
REINSTALL = "Install kvfix again, from its wheel or its checkout."


@functools.lru_cache(maxsize=1)
def fixes() -> tuple[Fix, ...]:
    """Return every fix, sorted by code. If a fix cannot be loaded, skip the fix and log the error."""
    found = [fix for _, module in folder.modules().values() if (fix := _load(module)) is not None]
    if not found:
        engine_log.warning(
            f"this installation of kvfix is broken and fixes nothing: no fix in {folder.__file__}. {REINSTALL}"
        )
    return tuple(found)


def fixes_of(module: str) -> list[Fix]:
    """Return the fixes for functions in this module of vLLM or LMCache, sorted by code. Load no other fixes."""
    return [fix for fix in map(_load, modules_of_fixes().get(module, ())) if fix is not None]


@functools.lru_cache(maxsize=1)
def modules_of_fixes() -> dict[str, list[str]]:
    """Map modules of vLLM and LMCache to the modules of their fixes. Load only fixes that fingerprints.json lacks."""
    found: dict[str, list[str]] = {}
    indexed = set()
    for known in applicability.fingerprints().values():
        for module, names in known.get("fixes", {}).items():
            found.setdefault(module, []).extend(names)
            indexed.update(names)
    for _, name in folder.modules().values():
        fix = _load(name) if name not in indexed else None
        for module in {target.module for target in fix.targets} if fix is not None else ():
            found.setdefault(module, []).append(name)
    return {module: sorted(names) for module, names in found.items()}


@functools.cache
def _load(module: str) -> Fix | None:
    found: Fix | None = engine_log.guarded(f"loading {module}", lambda: import_module(module).FIX)
    return found


def find(name: str) -> Fix | None:
    return next((fix for fix in fixes() if name.upper() == fix.code or name.lower() == fix.slug), None)


def handling(rule: str, text: str | None = None) -> list[Fix]:
    """Return the fixes whose `evidence` has this rule, for any release. text: must match the pattern in `evidence`."""
    return [fix for fix in fixes() if rule in fix.evidence and (text is None or re.search(fix.evidence[rule], text))]


class FixRow(NamedTuple):
    """The state of a fix in a distribution. verdict: one of STATES. version: the installed version, or ""."""

    code: str
    slug: str
    dist: str
    version: str
    verdict: str
    reason: str


def rows(judge: Callable[[Target], Applicability] = applicability.judge) -> list[FixRow]:
    """Return one row for each fix and distribution. judge: called for functions that are not in `session.judged`."""
    return [row for fix in fixes() for row in rows_of(fix, judge)]


def rows_of(fix: Fix, judge: Callable[[Target], Applicability] = applicability.judge) -> Iterator[FixRow]:
    """Yield one row for each distribution of this fix. If the fixed code has several copies, show the worst state."""
    decisions = applicability.decide(fix, lambda target: session.judged.get(target) or judge(target))
    for dist in fix.dists:
        outcomes = [_outcome(fix, decision) for decision in decisions if dist in decision.dists]
        if any(each.state == "applied" for each in outcomes):  # another copy of the code may not be imported yet
            outcomes = [each for each in outcomes if each.state != "applicable"]
        state, reason, _ = min(outcomes, key=lambda each: STATES.index(each.state))
        yield FixRow(fix.code, fix.slug, dist, installed_source.version(dist), state, reason)


def _outcome(fix: Fix, decision: Decision) -> Applicability:
    """Return the state of one copy of the fixed code in this process. decision: the decision about this copy."""
    if decision.outcome.state != "applicable":
        return decision.outcome
    if not fix.fixable:
        harmless, reason = fix.harmless(), decision.outcome.reason
        if harmless:
            return Applicability("not-affected", f"{reason}; {harmless}")
        first = " ".join(fix.section("Workaround").partition("\n\n")[0].split())
        return Applicability("unfixable", f"{reason}, and cannot be fixed from outside: {first}")
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


def rows_handling(finding: Finding) -> list[FixRow]:
    """Return the rows of the fixes for this finding. Leave out fixes that the installed releases do not need."""
    needed = ("applied", "applicable", "opt-in", "refused", "unknown", "unfixable")
    found = [row for fix in handling(finding.code, finding.message) for row in rows_of(fix)]
    return [row for row in found if row.verdict in needed]
