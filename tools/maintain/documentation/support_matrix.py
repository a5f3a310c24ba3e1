"""Make the page "Is my pair safe?" (theme/pair.js) from the fingerprints and docs/matrix.json (`make matrix`).

A pair is a vLLM release and an LMCache release. For some pairs, mostly pairs of old releases, the lab has no result
about a bug. For these pairs, the page shows what the hashes of the functions (fingerprints) say, because a missing
result would look like no bug.
"""

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from packaging.version import Version

from kvfix import applicability, catalogue
from kvfix.fixes.record import Fix
from kvfix_tools import fix_overview
from kvfix_tools.lab.scenario import scenarios
from maintain.documentation.markdown import span, table
from maintain.scenario_matrix import Pairs

FIXED, NOT_FIXED, CLEAN, NOT_PLAYED = "bug, fixed", "bug, **not fixed**", "no bug", "-"
#: Letters for the cells in the page's data. A NOT_PLAYED cell gets C if the released code has the bug, and r if the
#: code does not have the bug. The cell gets - if neither release has a function that the fix changes.
_LETTERS = {FIXED: "F", NOT_FIXED: "N", CLEAN: "c"}
_IN_THE_CODE, _RIGHT, _ABSENT = "C", "r", "-"


def as_json(pairs: Pairs) -> str:
    """Return the page's data as JSON without "<", because a text "</script>" would end the script element."""
    return json.dumps(data(pairs), separators=(",", ":")).replace("<", "\\u003c")


def data(pairs: Pairs) -> dict[str, Any]:
    """Return the data for pair.js. `cells` has a string per vLLM release, with a letter per LMCache release."""
    vllm, lmcache = _releases(pairs)
    return {
        "vllm": vllm,
        "lmcache": lmcache,
        "failed": {f"{pair[0]} {pair[1]}": played["why"] for pair, played in pairs.items() if "why" in played},
        "fixes": [
            {
                **{name: getattr(fix, name) for name in ("code", "title", "effect")},
                "applied": "opt-in" if fix.opt_in else "default" if fix.fixable else "never",
                "connectors": sorted(fix_overview.connectors(fix)),
                "right": {dist: fix_overview.first_right(fix, dist) for dist in fix.dists},
                "cells": _letters(fix, pairs),
            }
            for fix in catalogue.fixes()
        ],
    }


def _letters(fix: Fix, pairs: Pairs) -> list[str]:
    vllm, lmcache = _releases(pairs)
    cells = _cells(pairs, _scenarios(fix.code))
    wrong = {(dist, release) for dist in fix.dists for release in fix_overview.wrong_releases(fix, dist)}
    known = {
        (target.dist, release)
        for target in fix.targets
        if not target.helper
        for releases in applicability.fingerprints()[target.dist]["functions"].get(target.name, {}).values()
        for release in releases
    }

    def letter(pair: tuple[str, str]) -> str:
        releases = {("vllm", pair[0]), ("lmcache", pair[1])}
        by_code = _IN_THE_CODE if releases & wrong else _RIGHT if releases & known else _ABSENT
        return _LETTERS.get(cells[pair], by_code)

    return ["".join(letter((one, other)) for other in lmcache) for one in vllm]


def of_fix(pairs: Pairs, code: str) -> str:
    """Return a fix's table. A row is a vLLM release. A column has neighbouring LMCache releases with equal outcomes."""
    slugs = _scenarios(code)
    if not slugs:
        return "No scenario of the lab shows this bug. Tests with the released code show the bug instead.\n"
    cells = _cells(pairs, slugs)
    vllm, lmcache = _releases(pairs)
    equal = groupby(lmcache, key=lambda release: [cells[each, release] for each in vllm])
    columns = [(list(releases), outcomes) for outcomes, releases in equal]
    head = ["vLLM ↓ LMCache →", *(span(releases, lmcache) for releases, _ in columns)]
    rows = [(each, *(outcomes[at] for _, outcomes in columns)) for at, each in enumerate(vllm)]
    names = ", ".join(f"`{slug}`" for slug in sorted(slugs))
    return f"{table(head, rows)}\n{when_played(pairs)} Scenario: {names} (`kvfix lab run SLUG`).\n"


def _releases(pairs: Pairs) -> tuple[list[str], list[str]]:
    vllm, lmcache = (sorted({pair[at] for pair in pairs}, key=Version) for at in (0, 1))
    return vllm, lmcache


def _scenarios(code: str) -> set[str]:
    return {each.slug for each in scenarios() if code in each.fixes}


def _cells(pairs: Pairs, slugs: set[str]) -> dict[tuple[str, str], str]:
    """Return {(vllm, lmcache): FIXED, NOT_FIXED, CLEAN or NOT_PLAYED}."""
    return {pair: _worst(played.get("outcomes", ()), slugs) for pair, played in pairs.items()}


def _worst(rows: Iterable[dict[str, str]], slugs: set[str]) -> str:
    """Return the worst outcome of these scenarios with one pair of releases."""
    outcomes = [(row["released"], row["fixed"]) for row in rows if row["scenario"] in slugs]
    if any(released in ("violated", "error") for released, _ in outcomes):
        bad = any(released != "clean" and fixed in ("violated", "error") for released, fixed in outcomes)
        return NOT_FIXED if bad else FIXED
    return CLEAN if any(released == "clean" for released, _ in outcomes) else NOT_PLAYED


def when_played(pairs: Pairs) -> str:
    dates = sorted({pair["date"] for pair in pairs.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Played {when} on Python {', '.join(sorted({pair['python'] for pair in pairs.values()}, key=Version))}."
