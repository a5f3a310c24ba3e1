"""Cause and remedy of a finding, in the order in which to try them. Fixes and releases come from the catalogue."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import fix, verdict

if TYPE_CHECKING:
    from kvfix_tools.diagnose.case import Case
    from kvfix_tools.diagnose.seen import Found

_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}


class Step(NamedTuple):
    """kind: `fix`, `release` or `setting`. name: the fix's code, the release, or ""."""

    kind: str
    name: str
    text: str


def fixes(case: Case, found: Found) -> list[fix.Fix]:
    """Fixes of the finding that are for the releases of its log; where they are not known, all."""
    return [each for each in _named(found) if _dist(case, found, each) is not None]


def _named(found: Found) -> list[fix.Fix]:
    return [each for code in found.rule.fixes if (each := fix.find(code)) is not None]


def _dist(case: Case, found: Found, each: fix.Fix) -> str | None:
    """The distribution that the fix is for here; None: the log's releases do not need it."""
    concerned = (p.dist for p in each.patches if case.releases.within(p.dist, p.broken, found.file) is not False)
    return next(concerned, None)


def cause(case: Case, found: Found) -> str:
    """In the finding's own words where it has any, else in those of its first fix that concerns this log."""
    own = found.rule.section("Cause")
    if own:
        return own
    concerned = fixes(case, found) or _named(found)
    return " ".join(concerned[0].section("Cause").split()) if concerned else ""


def steps(case: Case, found: Found) -> list[Step]:
    """What to do, the surest first: kvfix's fix, the release that has it right, the setting that avoids it."""
    concerned = fixes(case, found)
    made = [Step("fix", each.code, f"{each.code} {each.slug}: {_how(each)}") for each in concerned if each.mends]
    releases = (_release(case, found, each) for each in concerned)
    made += dict.fromkeys(step for each, step in zip(concerned, releases, strict=True) if each.mends or step.name)
    workarounds = [Step("setting", each.code, _workaround(each)) for each in concerned if not each.mends]
    made += workarounds
    setting = found.rule.section("Setting")
    if setting and not workarounds:
        made.append(Step("setting", "", setting))
    return made


def _how(each: fix.Fix) -> str:
    return f"kvfix run --only {each.code} -- CMD (opt-in)" if each.opt_in else "kvfix run -- CMD, or kvfix.apply()"


def _workaround(each: fix.Fix) -> str:
    """Of what cannot be mended from outside."""
    return f"{' '.join(each.section('Workaround').split())} ({each.code} {each.slug})"


def _release(case: Case, found: Found, each: fix.Fix) -> Step:
    dist = _dist(case, found, each) or each.patches[0].dist
    release = first_right(each, dist)
    named = _NAMES.get(dist, dist)
    if release is None:
        return Step("release", "", f"no release of {named} is right yet ({each.code})")
    return Step("release", f"{named} {release}", f"upgrade to {named} {release}, which does not need {each.code}")


@lru_cache(maxsize=256)
def first_right(found: fix.Fix, dist: str) -> str | None:
    """The first release of this distribution after all that are broken; None: there is none that kvfix knows."""
    releases = verdict.fingerprints().get(dist, {}).get("releases", [])
    specifiers = [SpecifierSet(patch.broken, prereleases=True) for patch in found.patches if patch.dist == dist]
    broken = [Version(each) for each in releases if any(each in specifier for specifier in specifiers)]
    if not broken:
        return None
    return next((each for each in releases if Version(each) > max(broken)), None)
