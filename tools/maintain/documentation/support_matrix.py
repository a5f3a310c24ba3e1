"""The support matrix, LMCache x vLLM x fix, from docs/matrix.json, which `make matrix` writes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from packaging.version import Version

from kvfix import catalogue
from kvfix.fixes.api import Fix
from kvfix_tools.lab.scenario import scenarios
from maintain.documentation.markdown import link, links, span, table
from maintain.scenario_matrix import Pairs

FIXED, NOT_FIXED, CLEAN, NOT_PLAYED = "bug, fixed", "bug, **not fixed**", "no bug", "-"

#: {(vllm, lmcache): one of the four above}
Cells = dict[tuple[str, str], str]


def page(pairs: Pairs) -> str:
    vllm, lmcache = _releases(pairs)
    cells = {fix: _cells(pairs, slugs) for fix in catalogue.fixes() if (slugs := _scenarios(fix))}
    rows, sections = [], []
    for release in reversed(lmcache):
        counts = [_count([of_one[each, release] for of_one in cells.values()], pairs[each, release]) for each in vllm]
        rows.append((f"[{release}](#lmcache-{release})", *counts))
        by_fix = [(fix, [of_one[each, release] for each in vllm]) for fix, of_one in cells.items()]
        detail = [(_named(fix), *row) for fix, row in by_fix if FIXED in row or NOT_FIXED in row]
        head = ("fix", *(f"vLLM {each}" for each in vllm))
        sections.append(f"## LMCache {release} {{ #lmcache-{release} }}\n\n{table(head, detail)}")
    not_played = links((fix.code for fix in catalogue.fixes() if fix not in cells), up="")
    return f"""# Is my pair safe?

Each LMCache release in the scheduler of each vLLM release, in [the lab](lab.md): every scenario as released, and again
with the fixes of kvfix. {_played(pairs)} A number is how many of kvfix's fixes have a bug to fix in that pair that the
lab could show; the release leads to which ones.

{table(("LMCache ↓ vLLM →", *vllm), rows)}
`{FIXED}`: the lab shows the bug as released, and not with kvfix. `{CLEAN}`: it was played, and the bug did not show.
`{NOT_PLAYED}`: not played there: what the bug needs does not exist in that pair, or the lab cannot play it
([lab](lab.md)). The data, with the reasons: [matrix.json](matrix.json).

For other releases, and for code that somebody has edited, ask `kvfix status`: it goes by the code that is installed,
not by this table. Not played by the lab, but shown by other tests, or only reported by kvfix: {not_played}.

{chr(10).join(sections)}"""


def of_fix(pairs: Pairs, code: str) -> str:
    """The outcomes of one fix: vLLM by LMCache, releases with the same outcomes in one column."""
    slugs = _scenarios(next(fix for fix in catalogue.fixes() if fix.code == code))
    if not slugs:
        return "The lab does not play it; tests with the released code stand for it.\n"
    cells = _cells(pairs, slugs)
    vllm, lmcache = _releases(pairs)
    columns = [
        (list(releases), outcomes)
        for outcomes, releases in groupby(lmcache, key=lambda release: [cells[each, release] for each in vllm])
    ]
    head = ["vLLM ↓ LMCache →", *(span(releases, lmcache) for releases, _ in columns)]
    rows = [(each, *(outcomes[at] for _, outcomes in columns)) for at, each in enumerate(vllm)]
    names = ", ".join(f"`{slug}`" for slug in sorted(slugs))
    return f"{table(head, rows)}\n{_played(pairs)} Scenario: {names} (`kvfix lab run SLUG`).\n"


def _releases(pairs: Pairs) -> tuple[list[str], list[str]]:
    """(vllm, lmcache), the oldest first"""
    vllm, lmcache = (sorted({pair[at] for pair in pairs}, key=Version) for at in (0, 1))
    return vllm, lmcache


def _scenarios(fix: Fix) -> set[str]:
    return {each.slug for each in scenarios() if fix.code in each.fixes}


def _cells(pairs: Pairs, slugs: set[str]) -> Cells:
    return {
        pair: _worst(row for row in played.get("outcomes", ()) if row["scenario"] in slugs)
        for pair, played in pairs.items()
    }


def _worst(rows: Iterable[dict[str, str]]) -> str:
    """Return the worst outcome of the scenarios of one fix with one pair of releases."""
    outcomes = [(row["released"], row["fixed"]) for row in rows]
    if any(released in ("violated", "error") for released, _ in outcomes):
        bad = any(released != "clean" and fixed in ("violated", "error") for released, fixed in outcomes)
        return NOT_FIXED if bad else FIXED
    return CLEAN if any(released == "clean" for released, _ in outcomes) else NOT_PLAYED


def _count(outcomes: list[str], pair: dict[str, object]) -> str:
    if "why" in pair:
        return "could not be played"
    not_fixed = outcomes.count(NOT_FIXED)
    return f"{outcomes.count(FIXED)} fixed" + (f", **{not_fixed} not**" if not_fixed else "")


def _played(pairs: Pairs) -> str:
    dates = sorted({pair["date"] for pair in pairs.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Played {when} on Python {', '.join(sorted({pair['python'] for pair in pairs.values()}, key=Version))}."


def _named(fix: Fix) -> str:
    return f"{link(fix.code, up='')} {fix.slug}{' (opt-in)' if fix.opt_in else ''}"
