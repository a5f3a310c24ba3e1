"""In which releases the text of a sign stands: in the released files that are here, and in checks.json.

Every release of LMCache is here, and one of vLLM. checks.json has what the others of vLLM raise and assert.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from ahocorasick_rs import AhoCorasick
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix_tools.diagnose import checks
from kvfix_tools.diagnose.problems import Problem, catalogue
from kvfix_tools.diagnose.signs import PLACE, Died, Logged, Sign, Stuck
from tests.conftest import RELEASES, release_names
from tests.diagnose.lines import site_packages

#: The first releases that the records cover.
FIRST = {"lmcache": Version("0.3.9"), "vllm": Version("0.11.2")}
#: Between two literals of one string.
_JOINT = re.compile(r"""["']\s*\n\s*[rbf]*["']""")
#: A shorter text stands anywhere.
_SHORTEST = 6

#: {dist: releases}
Found = dict[str, frozenset[str]]


def needle(sign: Sign) -> str:
    """Return the part of the sign that the source must have: of its text, its line, or its function."""
    if sign.text:
        return _plain(max(PLACE.split(sign.text)[::2], key=len))
    if isinstance(sign, Logged | Died):
        return ""
    if not isinstance(sign, Stuck) and sign.source:
        return _plain(sign.source.removeprefix("assert "))
    return f"def{sign.within.rpartition(':')[2]}(" if sign.within and not sign.within.endswith("/") else ""


def _plain(text: str) -> str:
    """Without white space, and with one kind of quotes."""
    return re.sub(r"\s+", "", text.replace("\\", "")).replace('"', "'")


def claimed(problem: Problem, dist: str) -> list[str]:
    """Releases that the record covers, of those that were examined."""
    inside = SpecifierSet(problem.releases.get(dist, ""), prereleases=True)
    right = Version(problem.fixed[dist]) if dist in problem.fixed else None
    return [
        each
        for each in checks.known()[dist][0]
        if Version(each) >= FIRST[dist] and each in inside and (right is None or Version(each) < right)
    ]


@lru_cache(maxsize=1)
def anchors() -> dict[str, Found]:
    """{needle of a sign: the releases in whose source it stands}"""
    needles = sorted({part for each in catalogue() for sign in each.shows if len(part := needle(sign)) >= _SHORTEST})
    search = AhoCorasick(needles)
    found: dict[str, dict[str, set[str]]] = {part: {"lmcache": set(), "vllm": set()} for part in needles}

    def look(text: str, dist: str, releases: set[str]) -> None:
        for index in {match[0] for match in search.find_matches_as_indexes(text, overlapping=True)}:
            found[needles[index]][dist] |= releases

    for release in release_names():
        look(_source(RELEASES / release / "lmcache"), "lmcache", {release})
    look(_source(site_packages() / "vllm"), "vllm", {"0.32.0"})
    for (_, function, check), releases in checks.known()["vllm"][1].items():
        look("\n".join((_plain(check.text), _plain(check.condition), f"def{function}(")), "vllm", releases)
    return {part: {dist: frozenset(some) for dist, some in each.items() if some} for part, each in found.items()}


def _source(package: Path) -> str:
    files = (_plain(_JOINT.sub("", path.read_text(errors="replace"))) for path in sorted(package.rglob("*.py")))
    return "\n".join(files)
