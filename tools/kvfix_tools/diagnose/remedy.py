"""Cause and remedy of a finding, in the order in which to try them. Fixes and releases come from the catalogue."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import fix, verdict

if TYPE_CHECKING:
    from kvfix_tools.diagnose.case import Case
    from kvfix_tools.diagnose.findings import Rule

_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}


class Step(NamedTuple):
    """kind: `fix`, `release` or `setting`. name: the fix's code, the release, or ""."""

    kind: str
    name: str
    text: str


def fixes(case: Case, rule: Rule) -> list[fix.Fix]:
    """Fixes of the finding that are for the releases of this log; where they are not known, all."""
    named = [found for code in rule.fixes if (found := fix.find(code)) is not None]
    return [found for found in named if _concerns(case, found)]


def _concerns(case: Case, found: fix.Fix) -> bool:
    within = [case.within(patch.dist, patch.broken) for patch in found.patches]
    return any(answer is not False for answer in within)


def cause(case: Case, rule: Rule) -> str:
    own = rule.section("Cause")
    if own:
        return own
    concerned = fixes(case, rule) or [found for code in rule.fixes if (found := fix.find(code)) is not None]
    return _words(concerned[0].section("Cause")) if concerned else ""


def steps(case: Case, rule: Rule) -> list[Step]:
    """What to do, the surest first: kvfix's fix, the release that has it right, the setting that avoids it."""
    concerned = fixes(case, rule)
    made = []
    for found in concerned:
        how = f"kvfix run --only {found.code} -- CMD (opt-in)" if found.opt_in else "kvfix run -- CMD, or kvfix.apply()"
        made.append(Step("fix", found.code, f"{found.code} {found.slug}: {how}"))
    seen = set()
    for found in concerned:
        dist = next(
            (p.dist for p in found.patches if case.within(p.dist, p.broken) is not False), found.patches[0].dist
        )
        release = first_right(found, dist)
        named = _NAMES.get(dist, dist)
        name = f"{named} {release}" if release else ""
        text = (
            f"upgrade to {name}, which does not need {found.code}"
            if release
            else f"no release of {named} is right yet ({found.code})"
        )
        if text not in seen:
            seen.add(text)
            made.append(Step("release", name, text))
    setting = rule.section("Setting")
    if setting:
        made.append(Step("setting", "", setting))
    return made


@lru_cache(maxsize=256)
def first_right(found: fix.Fix, dist: str) -> str | None:
    """The first release of this distribution after all that are broken; None: there is none that kvfix knows."""
    releases = verdict._fingerprints().get(dist, {}).get("releases", [])
    specifiers = [SpecifierSet(patch.broken, prereleases=True) for patch in found.patches if patch.dist == dist]
    broken = [Version(each) for each in releases if any(each in specifier for specifier in specifiers)]
    if not broken:
        return None
    return next((each for each in releases if Version(each) > max(broken)), None)


def _words(text: str) -> str:
    return " ".join(text.split())
