"""Whether a fix applies to the installed code. The version number alone never decides: LMCache changed these functions
in post releases, and people edit them. The fingerprint of the function decides. For code that no release has, the
behaviour probe decides; if it cannot, the state is unknown and nothing is applied. Pure: it does not read the session.
"""

from __future__ import annotations

import json
import pkgutil
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import installed_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from kvfix.fixes.api import Target

#: The worst first: a fix with several targets in one distribution has the worst state of them.
STATES = ("failed", "unknown", "applicable", "applied", "fixed-upstream", "not-affected", "not-installed")


class Applicability(NamedTuple):
    """state: one of STATES."""

    state: str
    reason: str


@lru_cache(maxsize=1)
def fingerprints() -> dict[str, Any]:
    """{dist: {"releases": [version], "functions": {target: {fingerprint: [version]}}}}, oldest version first.

    Taken from the released files by `make fingerprints`.
    """
    text = pkgutil.get_data("kvfix", "fingerprints.json")  # a file, or in a zip
    return dict(json.loads(text or b""))


def judge(target: Target) -> Applicability:
    """Judge by the installed file, without importing it. `applicable`: the code is known to be wrong."""
    if installed_source.package_dir(target.dist) is None:
        return Applicability("not-installed", f"{target.dist} is not installed")
    path = installed_source.source_file(target.dist, target.module)
    try:
        found = installed_source.fingerprint(path, target.function) if path is not None else None
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError) as error:
        return Applicability("unknown", f"{path} cannot be read as Python ({error}); reinstall {target.dist}")
    if found is None:
        return _judge_absent(target, path)
    known = fingerprints().get(target.dist, {}).get("functions", {}).get(target.name, {})
    if found not in known:
        return Applicability(
            "unknown",
            f"the code of {target.function} in {path} is of no known release; "
            "the behaviour probe decides in the process that imports it (kvfix status --probe)",
        )
    return judge_releases(target, known[found])


def judge_releases(target: Target, same_code: list[str]) -> Applicability:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    broken = SpecifierSet(target.broken, prereleases=True)
    code_of = f"has the code of {target.dist} {_span(same_code)}"
    if any(release in broken for release in same_code):
        return Applicability("applicable", f"{code_of}, which is wrong")
    releases = fingerprints()[target.dist]["releases"]
    last_wrong = max((Version(release) for release in releases if release in broken), default=None)
    if last_wrong is not None and Version(same_code[-1]) > last_wrong:
        return Applicability("fixed-upstream", f"{code_of}; fixed after {last_wrong}")
    return Applicability("not-affected", f"{code_of}, from before the bug")


def _judge_absent(target: Target, path: Path | None) -> Applicability:
    what = f"{target.function} in {path}" if path is not None else f"the module {target.module}"
    version = installed_source.version(target.dist)
    known = fingerprints().get(target.dist, {})
    absent = [
        release
        for release in known.get("releases", ())
        if not any(release in same for same in known["functions"].get(target.name, {}).values())
    ]
    if version in absent:
        return Applicability("not-affected", f"{target.dist} {version} has no {what}")
    return Applicability(
        "unknown",
        f"{what} has gone from {target.dist} {version or '(version unknown)'}; "
        "nothing to apply to: look for a kvfix release that knows this one",
    )


def judge_live(target: Target, module: ModuleType) -> Applicability:
    """Judge in a process that has imported the module: by the file, by the live function, and by the probe."""
    by_file = judge(target)
    found = installed_source.live_function(module, target.function)
    path = installed_source.source_file(target.dist, target.module)
    if found is None:
        return by_file if by_file.state == "not-affected" else _judge_absent(target, path)
    function = found[2]
    if path is not None and not installed_source.is_from_file(function, path):
        owner = getattr(function, "__module__", None) or "another tool"
        by_file = Applicability("unknown", f"{target.function} was replaced by {owner}")
    if by_file.state != "unknown":
        return by_file
    try:
        with _silent(module):
            wrong = target.probe(function, module)
    except Exception as error:  # noqa: BLE001
        return Applicability(
            "unknown", f"{by_file.reason}; the behaviour probe does not fit it ({type(error).__name__}: {error})"
        )
    what = by_file.reason.partition(";")[0]
    if wrong:
        return Applicability("applicable", f"{what}; the behaviour probe shows the bug")
    return Applicability("fixed-upstream", f"{what}; the behaviour probe finds it right")


@contextmanager
def _silent(module: ModuleType) -> Iterator[None]:
    """Silence the module's logger: a probe calls a hook that logs, and its numbers must not be in the engine's log."""
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


def _span(releases: list[str]) -> str:
    return ", ".join(releases) if len(releases) < 4 else f"{releases[0]} and others up to {releases[-1]}"
