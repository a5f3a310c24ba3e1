"""Return the cause of a finding, and the remedies that the user should try, surest first."""

import re
from typing import NamedTuple

from packaging.version import Version

from kvfix import catalogue
from kvfix.fixes.record import Fix
from kvfix_tools import fix_overview
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.log_finding import LogFinding
from kvfix_tools.diagnose.statements import NAMES

_REPORT = "kvfix-diagnose LOG --issue FILE.md"
#: Matches a remedy that begins with an upgrade.
_UPGRADE = re.compile(
    r"(?:upgrade to )?(?P<dist>vLLM|LMCache) (?P<release>\d+\.\d+(?:\.\w+)*)(?: or (?:newer|later))?(?:$|,| \()"
)


class Advice(NamedTuple):
    """A remedy. `kind` is `fix`, `release` or `setting`. `name` is the fix's code, the release, or ""."""

    kind: str
    name: str
    text: str


def fixes(log: Diagnosis, found: LogFinding) -> list[Fix]:
    """Return the fixes of this finding that the releases in the log need. Treat an unknown release as affected."""
    handling = catalogue.handling(found.rule.code, found.rule.message)
    return [each for each in handling if _dist(log, found, each) is not None]


def _dist(log: Diagnosis, found: LogFinding, each: Fix) -> str | None:
    """Return the distribution that the fix changes, or None if the log's releases do not need the fix."""
    concerned = (
        p.dist
        for p in each.targets
        if _within(log, found, p.dist, p.broken) is not False and ("lmcache" not in p.module or log.who.lmcache)
    )
    return next(concerned, None)


def _within(log: Diagnosis, found: LogFinding, dist: str, specifier: str) -> bool | None:
    return log.releases.within(dist, specifier, found.file, found.ran.get(dist))


def cause(log: Diagnosis, found: LogFinding) -> str:
    """Return the cause that the finding's rule names, or else the cause of a fix for the finding, or ""."""
    if found.rule.why:
        return found.rule.why
    concerned = fixes(log, found) or catalogue.handling(found.rule.code, found.rule.message)
    return " ".join(concerned[0].section("Cause").split()) if concerned else ""


def heading(found: LogFinding) -> str:
    """Return "Usual causes" if the finding's rule covers different failures (`general`), else "Why"."""
    return "Usual causes" if found.rule.general else "Why"


def advice(log: Diagnosis, found: LogFinding) -> list[Advice]:
    """Return the remedies, surest first: fixes, releases that need no fix, settings, releases in `rule.fixed_in`."""
    concerned = fixes(log, found)
    fixable = [each for each in concerned if each.fixable]
    made = []
    for each in fixable:
        how = f"kvfix run --plus {each.code} -- CMD (opt-in)" if each.opt_in else "kvfix run -- CMD, or kvfix.apply()"
        made.append(Advice("fix", each.code, f"{how} ({each.code} {each.slug}{_if_of(log, found, each)})"))
    made += _releases(log, found, fixable)
    unfixable = [each for each in concerned if not each.fixable]
    if found.rule.do:
        made.append(Advice("setting", unfixable[0].code if unfixable else "", found.rule.do))
    else:
        workarounds = ((each, " ".join(each.section("Workaround").split())) for each in unfixable)
        made += [Advice("setting", each.code, f"{text} ({each.code} {each.slug})") for each, text in workarounds]
    for dist, release in found.rule.fixed_in.items():
        if _within(log, found, dist, f">={release}") is not True:
            name = f"{NAMES.get(dist, dist)} {release}"
            made.append(Advice("release", name, f"upgrade to {name}"))
    return made


class Remedy(NamedTuple):
    """now: a remedy that the user can apply at once. good: the permanent remedy. Each text is one line, or ""."""

    now: str
    good: str


def remedy(log: Diagnosis, found: LogFinding) -> Remedy:
    made = advice(log, found)
    first = [found.rule.first.removesuffix(".")] if found.rule.first else []
    by_kind = {kind: [each.text for each in made if each.kind == kind] for kind in ("fix", "setting", "release")}
    now = by_kind["setting"][:1]
    if by_kind["fix"]:
        without = (by_kind["setting"] or [each for each in by_kind["release"] if each.startswith("upgrade")])[:1]
        now = by_kind["fix"][:2] + [f"without kvfix: {each[:1].lower()}{each[1:]}" for each in without]
    good = found.rule.for_good
    return Remedy("; ".join(first + now), _ahead(log, found, good) if good else "; ".join(by_kind["release"]))


def _ahead(log: Diagnosis, found: LogFinding, good: str) -> str:
    """Return `good` without upgrades that the log's engine already has. If nothing is left, advise a bug report."""
    kept = [part for part in good.split("; ") if not _is_behind(log, found, part)]
    if kept:
        return "; ".join(kept)
    named = _UPGRADE.match(good)
    right = f"{named['dist']} {named['release']}" if named is not None else good
    return f"report this problem with `{_REPORT}`: the log's release ({right} or newer) should not have the problem"


def _is_behind(log: Diagnosis, found: LogFinding, part: str) -> bool:
    named = _UPGRADE.match(part)
    alone = named is not None and not any(also in part for also in (", and ", ", with "))
    return named is not None and alone and _within(log, found, named["dist"].lower(), f">={named['release']}") is True


def _releases(log: Diagnosis, found: LogFinding, concerned: list[Fix]) -> list[Advice]:
    """Return, for each distribution, an upgrade to the first release that needs none of the fixes in `concerned`."""
    by_dist: dict[str, list[Fix]] = {}
    for each in concerned:
        by_dist.setdefault(_dist(log, found, each) or each.targets[0].dist, []).append(each)
    made = []
    for dist, needed in by_dist.items():
        name, codes = NAMES.get(dist, dist), ", ".join(each.code for each in needed)
        rights = [fix_overview.first_right(each, dist) for each in needed]
        if None in rights:
            made.append(Advice("release", "", f"keep kvfix ({codes}): no release of {name} fixes this bug yet"))
        else:
            right = max((each for each in rights if each is not None), key=Version)
            text = f"upgrade to {name} {right}, which does not need {codes}"
            made.append(Advice("release", f"{name} {right}", text))
    return made


def _if_of(log: Diagnosis, found: LogFinding, each: Fix) -> str:
    """Return a text that names the releases with the bug. If the log shows the release, return ""."""
    dist = _dist(log, found, each) or each.targets[0].dist
    broken = sorted(fix_overview.wrong_releases(each, dist), key=Version)
    if not broken or _within(log, found, dist, ">=0") is not None:
        return ""
    through = f" to {broken[-1]}" if len(broken) > 1 else ""
    return f", for {NAMES.get(dist, dist)} {broken[0]}{through}"
