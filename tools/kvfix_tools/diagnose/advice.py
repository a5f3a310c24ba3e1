"""Cause of a finding and what to do, in the order in which to try it. Fixes and releases come from the catalogue."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import applicability, catalogue
from kvfix.fixes.api import Fix
from kvfix_tools.diagnose.problems import NAMES, Problem

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding


_REPORT = "kvfix-diagnose LOG --issue FILE.md"
#: What ends it is a release, and nothing else with it.
_UPGRADE = re.compile(
    r"(?:upgrade to )?(?P<dist>vLLM|LMCache) (?P<release>\d+\.\d+(?:\.\w+)*)(?: or (?:newer|later))?(?:$|,| \()"
)


class Advice(NamedTuple):
    """kind: `fix`, `release` or `setting`. name: the fix's code, the release, or ""."""

    kind: str
    name: str
    text: str


def fixes(log: Diagnosis, found: LogFinding) -> list[Fix]:
    """Fixes of the finding that are for the releases of its log; where they are not known, all."""
    return [each for each in _named(found) if _dist(log, found, each) is not None]


def _named(found: LogFinding) -> list[Fix]:
    return [each for code in found.rule.fixes if (each := catalogue.find(code)) is not None]


def _dist(log: Diagnosis, found: LogFinding, each: Fix) -> str | None:
    """The distribution that the fix is for here; None: the log's releases do not need it."""
    concerned = (
        p.dist
        for p in each.targets
        if _within(log, found, p.dist, p.broken) is not False and ("lmcache" not in p.module or log.who.lmcache)
    )
    return next(concerned, None)


def _within(log: Diagnosis, found: LogFinding, dist: str, specifier: str) -> bool | None:
    return log.releases.within(dist, specifier, found.file, found.ran.get(dist))


def cause(log: Diagnosis, found: LogFinding) -> str:
    """In the finding's own words where it has any, else in those of its first fix that concerns this log."""
    own = found.rule.section("Cause")
    if own:
        return own
    concerned = fixes(log, found) or _named(found)
    return " ".join(concerned[0].section("Cause").split()) if concerned else ""


def heading(found: LogFinding) -> str:
    """What stands before the cause: a general record knows the kind of failure, and not this one."""
    return "Usual causes" if found.is_general else "Why"


def advice(log: Diagnosis, found: LogFinding) -> list[Advice]:
    """What to do, the surest first: kvfix's fix, the one release that is right for all of it, the setting."""
    concerned = fixes(log, found)
    made = [
        Advice("fix", each.code, f"{_how(each)} ({each.code} {each.slug}{_if_of(log, found, each)})")
        for each in concerned
        if each.fixable
    ]
    made += _releases(log, found, [each for each in concerned if each.fixable])
    unfixable = [each for each in concerned if not each.fixable]
    setting = found.rule.section("Setting")
    if setting:
        made.append(Advice("setting", unfixable[0].code if unfixable else "", setting))
    else:
        made += [Advice("setting", each.code, _workaround(each)) for each in unfixable]
    if isinstance(found.rule, Problem):
        made.append(Advice("setting", "", found.rule.now))
        made += _release_of(log, found, found.rule)
    return made


class Remedy(NamedTuple):
    """now: what to do tonight. good: what ends it. Each one line; "" where there is none."""

    now: str
    good: str


def remedy(log: Diagnosis, found: LogFinding) -> Remedy:
    made = advice(log, found)
    first = [section.removesuffix(".")] if (section := found.rule.section("First")) else []
    by_kind = {kind: [each.text for each in made if each.kind == kind] for kind in ("fix", "setting", "release")}
    now = by_kind["setting"][:1]
    if by_kind["fix"]:
        without = (by_kind["setting"] or [each for each in by_kind["release"] if each.startswith("upgrade")])[:1]
        now = by_kind["fix"][:2] + [f"without kvfix: {each[:1].lower()}{each[1:]}" for each in without]
    own = found.rule.section("Good")
    good = [own] if own else by_kind["release"]
    if isinstance(found.rule, Problem) and found.rule.good:
        good = [_ahead(log, found, found.rule.good)]
    return Remedy("; ".join(first + now), "; ".join(good))


def _ahead(log: Diagnosis, found: LogFinding, good: str) -> str:
    """Without releases that the log's own is not older than: they do not help it."""
    kept = [part for part in good.split("; ") if not _is_behind(log, found, part)]
    if kept:
        return "; ".join(kept)
    named = _UPGRADE.match(good)
    right = f"{named['dist']} {named['release']}" if named is not None else good
    return f"{right} should be right, and this log is not of an older one: report it with `{_REPORT}`"


def _is_behind(log: Diagnosis, found: LogFinding, part: str) -> bool:
    named = _UPGRADE.match(part)
    alone = named is not None and not any(also in part for also in (", and ", ", with "))
    return named is not None and alone and _within(log, found, named["dist"].lower(), f">={named['release']}") is True


def _release_of(log: Diagnosis, found: LogFinding, problem: Problem) -> list[Advice]:
    """The releases that a record names, where the log's are older."""
    made = []
    for dist, release in problem.fixed.items():
        if _within(log, found, dist, f">={release}") is not True:
            name = NAMES.get(dist, dist)
            made.append(Advice("release", f"{name} {release}", f"upgrade to {name} {release}"))
    return made


def _releases(log: Diagnosis, found: LogFinding, concerned: list[Fix]) -> list[Advice]:
    """For each distribution the one release that needs none of these fixes."""
    by_dist: dict[str, list[Fix]] = {}
    for each in concerned:
        by_dist.setdefault(_dist(log, found, each) or each.targets[0].dist, []).append(each)
    made = []
    for dist, needed in by_dist.items():
        name, codes = NAMES.get(dist, dist), ", ".join(each.code for each in needed)
        rights = [first_right(each, dist) for each in needed]
        if None in rights:
            made.append(Advice("release", "", f"no release of {name} is right yet: keep kvfix ({codes})"))
        else:
            right = max((each for each in rights if each is not None), key=Version)
            made.append(
                Advice("release", f"{name} {right}", f"upgrade to {name} {right}, which needs none of: {codes}")
            )
    return made


def _if_of(log: Diagnosis, found: LogFinding, each: Fix) -> str:
    """The releases that the fix is for, where the log does not say which one ran."""
    dist = _dist(log, found, each) or each.targets[0].dist
    broken = _broken(each, dist)
    if not broken or _within(log, found, dist, ">=0") is not None:
        return ""
    through = f" to {broken[-1]}" if len(broken) > 1 else ""
    return f", for {NAMES.get(dist, dist)} {broken[0]}{through}"


def _how(each: Fix) -> str:
    return f"kvfix run --plus {each.code} -- CMD (opt-in)" if each.opt_in else "kvfix run -- CMD, or kvfix.apply()"


def _workaround(each: Fix) -> str:
    """Of what cannot be fixed from outside."""
    return f"{' '.join(each.section('Workaround').split())} ({each.code} {each.slug})"


@lru_cache(maxsize=256)
def first_right(found: Fix, dist: str) -> str | None:
    """The first release of this distribution after all that are broken; None: there is none that kvfix knows."""
    broken = _broken(found, dist)
    releases = applicability.fingerprints().get(dist, {}).get("releases", [])
    return next((each for each in releases if broken and Version(each) > Version(broken[-1])), None)


@lru_cache(maxsize=256)
def _broken(found: Fix, dist: str) -> tuple[str, ...]:
    """The releases of this distribution that the fix is for, of those that kvfix knows; the oldest first."""
    specifiers = [SpecifierSet(target.broken, prereleases=True) for target in found.targets if target.dist == dist]
    releases = applicability.fingerprints().get(dist, {}).get("releases", [])
    return tuple(sorted((each for each in releases if any(each in spec for spec in specifiers)), key=Version))
