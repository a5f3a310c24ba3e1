"""`kvfix status --released`: show whether the newest LMCache and vLLM have changed the functions that fixes patch.

pip downloads the wheels with its own settings (index, mirrors, proxies, find-links, certificates). kvfix reads the
functions from the wheels, but installs no wheel and runs no code of a wheel.
"""

import json as jsonlib
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path
from typing import NamedTuple

import typer
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from kvfix import applicability, catalogue, installed_source
from kvfix.fixes.record import Target
from kvfix_tools import screen

DISTS = ("lmcache", "vllm")
#: kvfix reads the wheel for Linux on every machine, because all wheels of a release have the same Python code.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
_PYTHON = "3.12"
_LIMIT = 1800  # Time limit of one download in seconds. vLLM's wheel has several hundred megabytes.
#: How a function has changed, worst first. A fix has the worst change of its functions. `unknown`: kvfix cannot tell.
CHANGES = ("unknown", "changed", "unchanged")


class ReleasedRow(NamedTuple):
    """A fix. change: worst change of its functions since the newest known release. verdict: as in `kvfix status`."""

    code: str
    slug: str
    dist: str
    version: str
    change: str
    verdict: str
    reason: str


def status(json: bool) -> int:
    """Print the result. Return 0 if all functions are unchanged, else 1. If pip fails, end with exit code 77."""
    with tempfile.TemporaryDirectory(prefix="kvfix-released-") as folder:
        rows = [row for dist in DISTS for row in survey(dist, _wheel(dist, Path(folder)))]
    if json:
        print(jsonlib.dumps([row._asdict() for row in rows], indent=2))
    else:
        _print(rows)
    return int(any(row.change != "unchanged" for row in rows))


def _wheel(dist: str, folder: Path) -> Path:
    """Return the wheel that pip downloads. If pip fails, print why and what to do, and end with exit code 77."""
    print(f"asking the package index for the newest {dist} ...", file=sys.stderr)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms,
               "--python-version", _PYTHON, "--dest", str(folder / dist), dist]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        wheels = list((folder / dist).glob("*.whl")) if done.returncode == 0 else []
        if wheels:
            return wheels[0]
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        why = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with exit code {done.returncode}"
        why = (
            f"pip could not fetch {dist}: {why}. Run pip download --no-deps {dist}. If pip cannot reach the index, set "
            "PIP_INDEX_URL, PIP_FIND_LINKS or PIP_PROXY, or edit pip.conf"
        )
        if "No module named pip" in done.stderr:
            why = f"{sys.executable} has no pip, and kvfix downloads releases with pip. "
            why += f"Run {sys.executable} -m ensurepip, then this command again"
    except subprocess.TimeoutExpired:
        why = f"pip did not finish the download of {dist} in {_LIMIT} s"
    raise typer.Exit(screen.error(f"kvfix status --released: {why}", 77))


def survey(dist: str, wheel: Path) -> list[ReleasedRow]:
    version = str(parse_wheel_filename(wheel.name)[1])
    patches = [(fix, [target for target in fix.targets if target.dist == dist]) for fix in catalogue.fixes()]
    folder = wheel.with_name("files")
    names = {_file(target) for _, mine in patches for target in mine}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, names & set(archive.namelist()))
    rows = []
    for fix, mine in patches:
        if judged := [_judge(target, folder) for target in mine]:
            worst = min(judged, key=lambda each: (CHANGES.index(each[0]), applicability.STATES.index(each[1])))
            rows.append(ReleasedRow(fix.code, fix.slug, dist, version, *worst))
    return rows


def _file(target: Target) -> str:
    return f"{target.module.replace('.', '/')}.py"


def _judge(target: Target, folder: Path) -> tuple[str, str, str]:
    known = applicability.fingerprints()[target.dist]
    newest = known["releases"][-1]
    prints = known["functions"].get(target.name, {})
    path = folder / _file(target)
    try:
        found = installed_source.fingerprint(path, target.function) if path.is_file() else None
    except (SyntaxError, UnicodeDecodeError) as error:
        return "unknown", "refused", f"{_file(target)} cannot be read as Python here ({error})"
    if found is None:
        if not any(newest in releases for releases in prints.values()):
            reason = f"this release does not have {target.function}, and {newest} does not have it either"
            return "unchanged", "not-affected", reason
        return "unknown", "refused", f"{_file(target)} does not have {target.function} any more"
    if found not in prints:
        reason = f"kvfix does not know this version of {target.function}, and tests the function when an engine starts"
        return "changed", "unknown", reason
    verdict, reason, _ = applicability.judge_releases(target, prints[found])
    return ("unchanged" if newest in prints[found] else "changed"), verdict, f"{target.function} {reason}"


def _print(rows: list[ReleasedRow]) -> None:
    for dist in DISTS:
        mine = [row for row in rows if row.dist == dist]
        newest = applicability.fingerprints()[dist]["releases"][-1]
        if mine:
            known = "kvfix knows it" if Version(mine[0].version) <= Version(newest) else f"kvfix knows up to {newest}"
            counts = ", ".join(f"{sum(row.change == change for row in mine)} {change}" for change in CHANGES)
            print(f"newest {dist}: {mine[0].version} ({known}); fixes: {counts}")
    changed = [row for row in rows if row.change != "unchanged"]
    for row in changed:
        print(f"\n{row.code} {row.slug} ({row.dist} {row.version}): {row.change}, {row.verdict}")
        print(textwrap.fill(row.reason, 80, initial_indent="  ", subsequent_indent="    "))
    if changed:
        print("\nDoes the new release have the bugs? Install it, and run kvfix status --probe (see CONTRIBUTING.md).")
