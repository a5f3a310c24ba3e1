"""The support matrix, LMCache x vLLM x fix: from docs/matrix.json, which the lab writes. Nothing of it is typed."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from kvfix.fix import catalogue
from kvfix_tools.docs.markdown import link, links, span, table
from kvfix_tools.lab.matrix import Pairs, load
from kvfix_tools.lab.scenario import scenarios

__all__ = ["load", "of_fix", "page"]

_CORNER = "LMCache ↓ vLLM →"
CURED, NOT_CURED, CLEAN, NOT_PLAYED = "bug, cured", "bug, **not cured**", "no bug", "-"
_SHOWN = (CURED, NOT_CURED)


def _sorted(releases: Iterable[str]) -> list[str]:
    return sorted(set(releases), key=Version)


def _slugs() -> dict[str, set[str]]:
    """{code of a fix: the scenarios that it cures}"""
    return {fix.code: {each.slug for each in scenarios() if fix.code in each.fixes} for fix in catalogue()}


def _cell(outcomes: Iterable[dict[str, str]]) -> str:
    """Of the scenarios of one fix under one pair: the worst."""
    seen = [(row["released"], row["fixed"]) for row in outcomes]
    if any(released in ("violated", "error") for released, _ in seen):
        bad = any(released != "clean" and fixed in ("violated", "error") for released, fixed in seen)
        return NOT_CURED if bad else CURED
    return CLEAN if any(released == "clean" for released, _ in seen) else NOT_PLAYED


def _cells(pairs: Pairs, slugs: set[str]) -> dict[tuple[str, str], str]:
    return {
        pair: _cell(row for row in told.get("outcomes", ()) if row["scenario"] in slugs) for pair, told in pairs.items()
    }


def of_fix(pairs: Pairs, code: str) -> str:
    """What the lab saw of this fix: vLLM by LMCache, releases of which the same is to be said in one column."""
    slugs = _slugs()[code]
    if not slugs:
        return "The lab does not play it; tests with the released code stand for it.\n"
    cells = _cells(pairs, slugs)
    vllm, lmcache = (_sorted(pair[at] for pair in pairs) for at in (0, 1))
    columns: list[tuple[list[str], list[str]]] = []
    for release in lmcache:
        column = [cells.get((each, release), NOT_PLAYED) for each in vllm]
        if columns and columns[-1][1] == column:
            columns[-1][0].append(release)
        else:
            columns.append(([release], column))
    head = ["vLLM ↓ LMCache →", *(span(releases, lmcache) for releases, _ in columns)]
    rows = [(each, *(column[at] for _, column in columns)) for at, each in enumerate(vllm)]
    named = ", ".join(f"`{slug}`" for slug in sorted(slugs))
    return f"{table(head, rows)}\n{_played(pairs)} Scenario: {named} (`kvfix lab run SLUG`).\n"


def _played(pairs: Pairs) -> str:
    dates = sorted({told["date"] for told in pairs.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Played {when} on Python {', '.join(_sorted(told['python'] for told in pairs.values()))}."


def page(pairs: Pairs) -> str:
    vllm, lmcache = (_sorted(pair[at] for pair in pairs) for at in (0, 1))
    cells = {code: _cells(pairs, slugs) for code, slugs in _slugs().items() if slugs}
    rows, sections = [], []
    for release in reversed(lmcache):
        bugs = {each: [code for code in cells if cells[code].get((each, release)) in _SHOWN] for each in vllm}
        counts = [_count(cells, (each, release), bugs[each], pairs) for each in vllm]
        rows.append((f"[{release}](#lmcache-{release})", *counts))
        found = [code for code in cells if any(code in bugs[each] for each in vllm)]
        detail = table(
            ("fix", *(f"vLLM {each}" for each in vllm)),
            [(_named(code), *(cells[code].get((each, release), NOT_PLAYED) for each in vllm)) for code in found],
        )
        sections.append(f"## LMCache {release} {{ #lmcache-{release} }}\n\n{detail}")
    overview = table((_CORNER, *vllm), rows)
    unplayed = [code for code, slugs in _slugs().items() if not slugs]
    return f"""# Is my pair safe?

Each LMCache release in the scheduler of each vLLM release, in [the lab](lab.md): every scenario as released, and again
with the fixes of kvfix. {_played(pairs)} A number is how many of kvfix's fixes have a bug to cure in that pair that the
lab could show; the release leads to which ones.

{overview}
`{CURED}`: the lab saw the bug as released, and none with kvfix. `{CLEAN}`: it was played, and did not show.
`{NOT_PLAYED}`: not played there, for what the bug needs does not exist in that pair, or the lab cannot play it
([lab](lab.md)). The data, with the reasons: [matrix.json](matrix.json).

Of other releases, and of code that somebody has edited, `kvfix status` tells: it goes by the code that is installed,
not by this table. Not played by the lab, and shown by tests otherwise, or told by kvfix only: {links(unplayed, up="")}.

{chr(10).join(sections)}"""


def _count(cells: dict[str, dict[tuple[str, str], str]], pair: tuple[str, str], bugs: list[str], pairs: Pairs) -> str:
    if "why" in pairs.get(pair, {"why": ""}):
        return "could not be played"
    open_bugs = sum(cells[code][pair] == NOT_CURED for code in bugs)
    return f"{len(bugs)} cured" if not open_bugs else f"{len(bugs) - open_bugs} cured, **{open_bugs} not**"


def _named(code: str) -> str:
    found = next(fix for fix in catalogue() if fix.code == code)
    return f"{link(code, up='')} {found.slug}{' (opt-in)' if found.opt_in else ''}"
