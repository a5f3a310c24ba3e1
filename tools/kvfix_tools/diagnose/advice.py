"""Cause of a finding and what to do, in the order in which to try it. Fixes and releases come from the catalogue."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import applicability, catalogue
from kvfix.fixes.api import Fix

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding

_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}


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
    concerned = (p.dist for p in each.targets if log.releases.within(p.dist, p.broken, found.file) is not False)
    return next(concerned, None)


def cause(log: Diagnosis, found: LogFinding) -> str:
    """In the finding's own words where it has any, else in those of its first fix that concerns this log."""
    own = found.rule.section("Cause")
    if own:
        return own
    concerned = fixes(log, found) or _named(found)
    return " ".join(concerned[0].section("Cause").split()) if concerned else ""


def advice(log: Diagnosis, found: LogFinding) -> list[Advice]:
    """What to do, the surest first: kvfix's fix, the release that has it right, the setting that avoids it."""
    concerned = fixes(log, found)
    made = [Advice("fix", each.code, f"{each.code} {each.slug}: {_how(each)}") for each in concerned if each.fixable]
    releases = (_release(log, found, each) for each in concerned)
    made += dict.fromkeys(one for each, one in zip(concerned, releases, strict=True) if each.fixable or one.name)
    workarounds = [Advice("setting", each.code, _workaround(each)) for each in concerned if not each.fixable]
    made += workarounds
    setting = found.rule.section("Setting")
    if setting and not workarounds:
        made.append(Advice("setting", "", setting))
    return made


def _how(each: Fix) -> str:
    return f"kvfix run --only {each.code} -- CMD (opt-in)" if each.opt_in else "kvfix run -- CMD, or kvfix.apply()"


def _workaround(each: Fix) -> str:
    """Of what cannot be fixed from outside."""
    return f"{' '.join(each.section('Workaround').split())} ({each.code} {each.slug})"


def _release(log: Diagnosis, found: LogFinding, each: Fix) -> Advice:
    dist = _dist(log, found, each) or each.targets[0].dist
    release = first_right(each, dist)
    named = _NAMES.get(dist, dist)
    if release is None:
        return Advice("release", "", f"no release of {named} is right yet ({each.code})")
    return Advice("release", f"{named} {release}", f"upgrade to {named} {release}, which does not need {each.code}")


@lru_cache(maxsize=256)
def first_right(found: Fix, dist: str) -> str | None:
    """The first release of this distribution after all that are broken; None: there is none that kvfix knows."""
    releases = applicability.fingerprints().get(dist, {}).get("releases", [])
    specifiers = [SpecifierSet(target.broken, prereleases=True) for target in found.targets if target.dist == dist]
    broken = [Version(each) for each in releases if any(each in specifier for specifier in specifiers)]
    if not broken:
        return None
    return next((each for each in releases if Version(each) > max(broken)), None)
