"""`make fingerprints`: write fingerprints of functions with a fix, and file hashes, to kvfix/fingerprints.json.

    python -m maintain fingerprints lmcache .cache/lmcache/*

Each folder has one release of the distribution. The folder is a `site-packages`, or comes from `pip install --no-deps
--target FOLDER`. In fingerprints.json, the entries of other releases stay.
"""

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from packaging.version import Version

import kvfix
from kvfix import catalogue, installed_source
from kvfix_tools.doctor.packages import Packages

FILE = Path(kvfix.__file__).with_name("fingerprints.json")
#: The data of one release: ({target: fingerprint}, {module: hash of the module's file})
Taken = tuple[dict[str, str], dict[str, str]]


def take(dist: str, folder: Path) -> tuple[str, Taken]:
    """Return (version, data) of the release in this folder. Raise ValueError if the folder has no release."""
    package = Packages([str(folder)]).get(dist)
    if package is None or not package.version:
        raise ValueError(f"{folder} holds no distribution of {dist}")
    functions, files = dict[str, str](), dict[str, str]()
    for target in (target for fix in catalogue.fixes() for target in fix.targets if target.dist == dist):
        if path := package.file(target.module):
            files[target.module] = installed_source.file_hash(path)
            if fingerprint := installed_source.fingerprint(path, target.function):
                functions[target.name] = fingerprint
    return package.version, (functions, files)


def without(mine: dict[str, Any], releases: Container[str]) -> dict[str, Any]:
    """Return `mine`, the data of one distribution, without the data of these releases."""
    functions = {
        name: {taken: left for taken, its in found.items() if (left := [each for each in its if each not in releases])}
        for name, found in mine["functions"].items()
    }
    files = {
        module: {file_hash: release for file_hash, release in hashes.items() if release not in releases}
        for module, hashes in mine["files"].items()
    }
    kept = [release for release in mine["releases"] if release not in releases]
    return {**mine, "releases": kept, "functions": functions, "files": files}


def merge(known: dict[str, Any], dist: str, taken: dict[str, Taken]) -> dict[str, Any]:
    """Return `known` with the releases of `taken` added or replaced. Sort the data, to change few lines of the file."""
    mine = without(known.get(dist, {"releases": [], "functions": {}, "files": {}}), taken)
    functions, files = mine["functions"], mine["files"]
    for release, (its_functions, its_files) in taken.items():
        for target, fingerprint in its_functions.items():
            functions.setdefault(target, {}).setdefault(fingerprint, []).append(release)
        for module, file_hash in its_files.items():  # keep only the oldest release with this version of the file
            hashes = files.setdefault(module, {})
            hashes[file_hash] = min(release, hashes.get(file_hash, release), key=Version)
    for found in functions.values():
        for its in found.values():
            its.sort(key=Version)
    # Leave out a function without a release: no fix needs the function, or no release has the function any more.
    functions = {name: _ordered(found, lambda its: its[0]) for name, found in sorted(functions.items()) if found}
    files = {module: _ordered(hashes, str) for module, hashes in sorted(files.items()) if hashes}
    tables = {"functions": functions, "files": files, "fixes": modules_of_fixes(dist)}
    return {**known, dist: {"releases": sorted([*mine["releases"], *taken], key=Version), **tables}}


def _ordered(found: dict[str, Any], release: Callable[[Any], str]) -> dict[str, Any]:
    return dict(sorted(found.items(), key=lambda item: Version(release(item[1]))))


def modules_of_fixes(dist: str) -> dict[str, list[str]]:
    """Return {module of the distribution: names of the kvfix modules with the fixes for this module}."""
    found: dict[str, set[str]] = {}
    for fix in catalogue.fixes():
        for target in fix.targets if fix.fixable else ():
            if target.dist == dist:
                found.setdefault(target.module, set()).add(fix.module_name)
    return {module: sorted(names) for module, names in sorted(found.items())}


def main(dist: str, folders: list[Path]) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    taken = dict(take(dist, folder) for folder in folders)
    FILE.write_text(json.dumps(merge(known, dist, taken), indent=1) + "\n")
    print(f"{FILE}: {dist} {', '.join(sorted(taken, key=Version))}")
