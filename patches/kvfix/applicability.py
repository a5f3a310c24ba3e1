"""Judge whether an installed function has the bug of a fix, and decide whether to apply the fix.

The version number is not enough, because LMCache's post releases change functions, and users edit files. kvfix looks
for a release with the same file (by its hash). If no release has the file, kvfix looks for a release with the same
function (by its fingerprint). If no release has the function, the fix's behaviour probe calls the function and decides.
If the probe cannot decide, kvfix refuses the function.

Some code exists in several copies (`Owner.copy`). A fix has one group of functions for each copy. kvfix decides about
each group separately. In a group, kvfix wraps either all functions with the bug, or none. kvfix refuses a group if a
function is unknown, cannot be wrapped, or is missing unexpectedly, or if no release has all functions of the group.
"""

from __future__ import annotations

import json
import pkgutil
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import installed_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import ModuleType

    from kvfix.fixes.record import Fix, Target

#: The states of a function or a fix, worst first. The state of a fix is the worst state of its functions.
#: refused: no release has this code, and no behaviour probe fits the code. unknown: a behaviour probe will decide in
#: the process that imports the function. Only a fix can be "unfixable" (a new release must fix the bug) or "opt-in".
STATES = (
    "refused", "unknown", "unfixable", "applicable", "opt-in", "applied", "fixed-upstream", "not-affected",
    "not-installed",
)  # fmt: skip


class Applicability(NamedTuple):
    """The state of a function or a fix. releases: the releases that have the function's code (None: not known)."""

    state: str
    reason: str
    releases: frozenset[str] | None = None


@lru_cache(maxsize=1)
def fingerprints() -> dict[str, Any]:
    """Return {distribution: data}. `make fingerprints` writes the data to fingerprints.json.

    - releases: [version], the oldest first
    - functions: {target: {fingerprint: [version]}}, the oldest version first
    - files: {module: {hash of the file: oldest version with this file}}
    - fixes: {module: [module of a fix]}
    """
    return dict(json.loads(pkgutil.get_data("kvfix", "fingerprints.json") or b""))  # kvfix may be in a zip


def judge(target: Target) -> Applicability:
    """Judge a function by its installed file, without importing the file."""
    if installed_source.package_dir(target.dist) is None:
        return Applicability("not-installed", f"{target.dist} is not installed")
    path = installed_source.source_file(target.dist, target.module)
    known = fingerprints().get(target.dist, {})
    prints: dict[str, list[str]] = known.get("functions", {}).get(target.name, {})
    same_file = found = None
    try:
        if path is not None:
            same_file = known.get("files", {}).get(target.module, {}).get(installed_source.file_hash(path))
            of_release = (each for each, releases in prints.items() if same_file in releases)
            found = next(of_release, None) if same_file else installed_source.fingerprint(path, target.function)
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        return Applicability("refused", f"{path} cannot be read as Python ({error}); reinstall {target.dist}")
    if found is None:
        return _judge_absent(target, path, same_file)
    if found not in prints:
        where = f"the code of {target.function} in {path} matches no known release"
        if target.probe is None:
            return Applicability("refused", f"{where}, and no behaviour probe can judge it")
        return Applicability(
            "unknown", f"{where}; the behaviour probe decides at the module's import (probe now: kvfix status --probe)"
        )
    return judge_releases(target, prints[found])


def judge_releases(target: Target, same_code: list[str]) -> Applicability:
    span = ", ".join(same_code) if len(same_code) < 4 else f"{same_code[0]} and others up to {same_code[-1]}"
    code_of = f"has the code of {target.dist} {span}"
    releases = frozenset(same_code)
    broken = _broken(target.dist, target.broken)
    if not broken.isdisjoint(same_code):
        return Applicability("applicable", f"{code_of}, which has the bug", releases)
    known: list[str] = fingerprints()[target.dist]["releases"]
    last_wrong = max((known.index(release) for release in broken), default=None)
    if last_wrong is not None and known.index(same_code[-1]) > last_wrong:
        return Applicability("fixed-upstream", f"{code_of}; fixed after {known[last_wrong]}", releases)
    return Applicability("not-affected", f"{code_of}, which is older than the bug", releases)


@lru_cache(maxsize=256)
def _broken(dist: str, specifiers: str) -> frozenset[str]:
    from packaging.specifiers import SpecifierSet

    admits = SpecifierSet(specifiers, prereleases=True)
    return frozenset(release for release in fingerprints()[dist]["releases"] if release in admits)


def wrong_releases(target: Target) -> frozenset[str]:
    """Return the known releases that have this function with the bug."""
    prints = fingerprints()[target.dist]["functions"].get(target.name, {})
    return _broken(target.dist, target.broken).intersection(set[str]().union(*prints.values()))


def _judge_absent(target: Target, path: Path | None, same_file: str | None = None) -> Applicability:
    """Judge a missing function. A known release without the function has no bug. same_file: release with this file."""
    what = f"{target.function} in {path}" if path is not None else f"the module {target.module}"
    known = fingerprints().get(target.dist, {})
    releases: list[str] = known.get("releases", [])
    having = set[str]().union(*known.get("functions", {}).get(target.name, {}).values())
    absent = frozenset(releases).difference(having)
    version = same_file or installed_source.version(target.dist)
    # If kvfix does not know the installed release, judge by the newest known release.
    compared = version if version in releases else next(reversed(releases), "")
    release = f"{target.dist} {version or '(version unknown)'}"
    if compared in absent:
        return Applicability("not-affected", f"{release} does not have {what}", absent)
    return Applicability("refused", f"{what} is missing from {release}; look for a newer release of kvfix")


def judge_live(target: Target, module: ModuleType, function: Any = None) -> Applicability:
    """Judge a function of an imported module by its file, by the function in the module, and by the probe.

    function: the function without kvfix's wrappers, if kvfix has wrapped the function.
    """
    by_file = judge(target)
    found = installed_source.live_function(module, target.function)
    path = installed_source.source_file(target.dist, target.module)
    if found is None:
        return by_file if by_file.state == "not-affected" else _judge_absent(target, path)
    owner, name, live = found
    is_elsewhere = name not in vars(owner) or getattr(owner, "__module__", module.__name__) != module.__name__
    if by_file.state == "not-affected" and is_elsewhere:
        return by_file  # the class inherits the function from another file, or the module only imports the class
    function = function if function is not None else live
    if path is not None and not installed_source.is_from_file(function, path):
        other = getattr(function, "__module__", None) or "another tool"
        by_file = Applicability("unknown", f"{target.function} was replaced by {other}")
    elif by_file.state != "unknown":
        return by_file
    what = by_file.reason.partition(";")[0]
    if target.probe is None:
        return Applicability("refused", f"{what}, and no behaviour probe can judge it")
    try:
        with _silent(module):
            wrong = target.probe(function, module)
    except Exception as error:  # noqa: BLE001
        return Applicability(
            "refused", f"{what}; the behaviour probe does not fit it ({type(error).__name__}: {error})"
        )
    if wrong:
        return Applicability("applicable", f"{what}; the behaviour probe shows the bug")
    return Applicability("fixed-upstream", f"{what}; the behaviour probe does not find the bug")


@contextmanager
def _silent(module: ModuleType) -> Iterator[None]:
    """Silence the module's logger, because functions that a probe calls must not write to the engine's log."""
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


class Decision(NamedTuple):
    """The decision about one group of a fix. outcome: the state of the whole group. wrapped: the functions to wrap."""

    group: tuple[Target, ...]
    outcome: Applicability
    wrapped: tuple[Target, ...]

    @property
    def dists(self) -> set[str]:
        return {target.dist for target in self.group if not target.helper}


def decide(fix: Fix, judge: Callable[[Target], Applicability]) -> list[Decision]:
    """Return the decision about each group of the fix. judge: a function that judges one target."""
    return [_decide(targets, {target: judge(target) for target in targets}) for _, targets in fix.groups]


def _decide(group: tuple[Target, ...], judged: dict[Target, Applicability]) -> Decision:
    outcome = _worst((target for target in group if not target.helper), judged)
    if outcome.state == "applicable":
        outcome = _obstacle(group, judged) or outcome
    is_applied = outcome.state == "applicable"
    return Decision(group, outcome, tuple(each for each in group if is_applied and judged[each].state == "applicable"))


def _worst(targets: Iterable[Target], judged: dict[Target, Applicability]) -> Applicability:
    found = [judged[target] for target in targets]
    return min(found, key=lambda each: STATES.index(each.state), default=Applicability("not-affected", ""))


def _obstacle(targets: tuple[Target, ...], judged: dict[Target, Applicability]) -> Applicability | None:
    """Return why kvfix refuses a group that has the bug, or None if kvfix can wrap the group."""
    worst = _worst(targets, judged)
    if worst.state in ("refused", "unknown"):
        return worst
    for target in targets:
        if judged[target].state == "fixed-upstream" and judged[target].releases is None:
            return Applicability("refused", f"other functions of the fix have the bug, but {target.function} does not")
    common: dict[str, frozenset[str]] = {}
    for target in targets:
        releases = judged[target].releases
        if releases is not None:  # None: the probe has judged this function
            common[target.dist] = common.get(target.dist, releases) & releases
        if not common.get(target.dist, True):
            others = f"{target.function} and the other functions of the fix"
            return Applicability("refused", f"no release of {target.dist} has both {others}")
    return None
