"""Whether a fix applies to what is installed. Never by version number alone: LMCache changed these functions in post
releases, and people edit them. The code of the function decides, by its fingerprint; for code that no release has,
the behaviour probe decides; else the verdict is unknown and nothing is applied.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

    from kvfix.fix import Fix, Patch

#: The verdicts; the worst first, which is the one a row tells when a fix has several patches in one distribution.
VERDICTS = ("failed", "unknown", "applicable", "applied", "fixed-upstream", "not-affected", "not-installed")


class Verdict(NamedTuple):
    verdict: str
    reason: str


class Row(NamedTuple):
    """One line of `kvfix status`: a fix on a distribution. `version` is "" where it is not known."""

    code: str
    slug: str
    dist: str
    version: str
    verdict: str
    reason: str


@lru_cache(maxsize=1)
def fingerprints() -> dict[str, Any]:
    """{dist: {"releases": [version], "functions": {target: {fingerprint: [version]}}}}, oldest version first.

    Taken from the released files by `make fingerprints`.
    """
    text = pkgutil.get_data("kvfix", "fingerprints.json")  # a file, or in a zip
    return dict(json.loads(text or b""))


def judge(patch: Patch) -> Verdict:
    """By the installed file, without importing it. `applicable`: the code is known to be wrong."""
    if target.package_dir(patch.dist) is None:
        return Verdict("not-installed", f"{patch.dist} is not installed")
    path = target.source_file(patch.dist, patch.module)
    try:
        found = target.fingerprint(path, patch.function) if path is not None else None
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        return Verdict("unknown", f"{path} cannot be read as Python ({error}); reinstall {patch.dist}")
    if found is None:
        return _judge_absent(patch, path)
    known = fingerprints().get(patch.dist, {}).get("functions", {}).get(patch.target, {})
    if found not in known:
        return Verdict(
            "unknown",
            f"the code of {patch.function} in {path} is of no known release; "
            "the behaviour probe decides in the process that imports it (kvfix status --probe)",
        )
    return judge_releases(patch, known[found])


def judge_releases(patch: Patch, same_code: list[str]) -> Verdict:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    broken = SpecifierSet(patch.broken, prereleases=True)
    code_of = f"has the code of {patch.dist} {_span(same_code)}"
    if any(release in broken for release in same_code):
        return Verdict("applicable", f"{code_of}, which is wrong")
    releases = fingerprints()[patch.dist]["releases"]
    last_wrong = max((Version(release) for release in releases if release in broken), default=None)
    if last_wrong is not None and Version(same_code[-1]) > last_wrong:
        return Verdict("fixed-upstream", f"{code_of}; fixed after {last_wrong}")
    return Verdict("not-affected", f"{code_of}, from before the bug")


def _judge_absent(patch: Patch, path: Path | None) -> Verdict:
    what = f"{patch.function} in {path}" if path is not None else f"the module {patch.module}"
    version = target.version(patch.dist)
    known = fingerprints().get(patch.dist, {})
    absent = [
        release
        for release in known.get("releases", ())
        if not any(release in same for same in known["functions"].get(patch.target, {}).values())
    ]
    if version in absent:
        return Verdict("not-affected", f"{patch.dist} {version} has no {what}")
    return Verdict(
        "unknown",
        f"{what} has gone from {patch.dist} {version or '(version unknown)'}; "
        "nothing to apply to: look for a kvfix release that knows this one",
    )


def judge_live(patch: Patch, module: ModuleType) -> Verdict:
    """In the process where the module has been imported: the file, what stands in its place, and the probe."""
    verdict = judge(patch)
    found = target.live_function(module, patch.function)
    path = target.source_file(patch.dist, patch.module)
    if found is None:
        return verdict if verdict.verdict == "not-affected" else _judge_absent(patch, path)
    function = found[2]
    if path is not None and not target.is_from_file(function, path):
        owner = getattr(function, "__module__", None) or "somebody else"
        verdict = Verdict("unknown", f"{patch.function} was replaced by {owner}")
    if verdict.verdict != "unknown":
        return verdict
    try:
        with _silent(module):
            wrong = patch.shows_bug(function, module)
    except Exception as error:  # noqa: BLE001
        return Verdict(
            "unknown", f"{verdict.reason}; the behaviour probe does not fit it ({type(error).__name__}: {error})"
        )
    what = verdict.reason.partition(";")[0]
    if wrong:
        return Verdict("applicable", f"{what}; the behaviour probe shows the bug")
    return Verdict("fixed-upstream", f"{what}; the behaviour probe finds it right")


@contextmanager
def _silent(module: ModuleType) -> Iterator[None]:
    """A probe calls a hook that logs; its numbers must not stand in the engine's log."""
    logger = getattr(module, "logger", None)
    before = getattr(logger, "disabled", None)
    if logger is None or before is None:
        yield
        return
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _unmended(fix: Fix, found: Verdict) -> Verdict:
    """The bug is there, and no correction of ours reaches it."""
    spared = fix.harmless()
    if spared:
        return Verdict("not-affected", f"{found.reason}; {spared}")
    first = " ".join(fix.section("Workaround").partition("\n\n")[0].split())
    return Verdict("failed", f"{found.reason}, and cannot be mended from outside: {first}")


def _span(releases: list[str]) -> str:
    return ", ".join(releases) if len(releases) < 4 else f"{releases[0]} and others up to {releases[-1]}"


def survey(decide: Callable[[Patch], Verdict] = judge) -> list[Row]:
    """One row for each fix and distribution. What was done in this process goes before what the files say."""
    from kvfix.fix import catalogue

    return [row for fix in catalogue() for row in rows(fix, decide)]


def rows(fix: Fix, decide: Callable[[Patch], Verdict] = judge) -> Iterator[Row]:
    """One row for each distribution that this fix is for."""
    from kvfix import arrival

    choice = arrival.choice()
    patching = sys.modules.get("kvfix.patching")
    settled: dict[Patch, Verdict] = patching.settled() if patching is not None else {}
    telling = [patch for patch in fix.patches if not patch.helper]
    for dist in dict.fromkeys(patch.dist for patch in telling):
        verdicts = [settled.get(patch) or decide(patch) for patch in telling if patch.dist == dist]
        worst = min(verdicts, key=lambda found: VERDICTS.index(found.verdict))
        if worst.verdict == "applicable" and not fix.mends:
            worst = _unmended(fix, worst)
        reason = worst.reason
        if worst.verdict == "applicable" and choice is not None and not choice.takes(fix.code, fix.opt_in):
            reason += "; switched off by the choice " + repr(str(choice))
        yield Row(fix.code, fix.slug, dist, target.version(dist), worst.verdict, reason)
