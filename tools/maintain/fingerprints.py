"""`make fingerprints`: take the fingerprints of every function that a fix corrects, from unpacked releases, into
`kvfix/fingerprints.json`.

    python -m maintain.fingerprints lmcache .cache/lmcache/*

Each folder is one release as `pip install --no-deps --target FOLDER` makes it; `site-packages` will do for the one
installed. What the file has of other releases stays.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

import kvfix
from kvfix import catalogue, installed_source

FILE = Path(kvfix.__file__).with_name("fingerprints.json")


def take(dist: str, folder: Path) -> tuple[str, dict[str, str]]:
    """(version, {target: fingerprint}) of the release in this folder. Raises ValueError if there is none."""
    versions = {found.name: found.version for found in metadata.distributions(path=[str(folder)])}
    providers = [name for name in installed_source.PROVIDERS.get(dist, (dist,)) if name in versions]
    if not providers:
        raise ValueError(f"{folder} holds no distribution of {dist}")
    found = {}
    for target in {
        target.name: target for fix in catalogue.fixes() for target in fix.targets if target.dist == dist
    }.values():
        path = folder.joinpath(*target.module.split(".")).with_suffix(".py")
        fingerprint = installed_source.fingerprint(path, target.function) if path.is_file() else None
        if fingerprint is not None:
            found[target.name] = fingerprint
    return versions[providers[0]], found


def merge(known: dict[str, Any], dist: str, taken: dict[str, dict[str, str]]) -> dict[str, Any]:
    """`known` with the releases in `taken` added or replaced; sorted, so that the file changes little."""
    by_release: dict[str, dict[str, str]] = {release: {} for release in known.get(dist, {}).get("releases", ())}
    for target, fingerprints in known.get(dist, {}).get("functions", {}).items():
        for fingerprint, releases in fingerprints.items():
            for release in releases:
                by_release[release][target] = fingerprint
    by_release.update(taken)
    releases = sorted(by_release, key=Version)
    functions: dict[str, dict[str, list[str]]] = {}
    for release in releases:
        for target, fingerprint in sorted(by_release[release].items()):
            functions.setdefault(target, {}).setdefault(fingerprint, []).append(release)
    return {**known, dist: {"releases": releases, "functions": dict(sorted(functions.items()))}}


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    dist, *folders = arguments
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    taken = dict(take(dist, Path(folder)) for folder in folders)
    FILE.write_text(json.dumps(merge(known, dist, taken), indent=1) + "\n")
    print(f"{FILE}: {dist} {', '.join(sorted(taken, key=Version))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
