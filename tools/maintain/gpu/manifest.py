"""The sizes and hashes of a bundle's files: written with the bundle, and checked on the host.

    python -m maintain.gpu.manifest FOLDER1

checks folder 1 and the folders next to it, and prints the wheels that are complete. Exit 1 if a wheel of folder 1 is
not.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

NAME = "manifest.json"


def write(bundle: Path) -> dict[str, int]:
    """Write the manifest into folder 1 of the bundle. Return the bytes of each folder."""
    about: dict[str, dict[str, int | str]] = {}
    sizes: dict[str, int] = {}
    for path in sorted(path for path in bundle.rglob("*") if path.is_file()):
        name, size = path.relative_to(bundle), path.stat().st_size
        about[str(name)] = {"bytes": size, "sha256": _sha256(path)}
        sizes[name.parts[0]] = sizes.get(name.parts[0], 0) + size
    (bundle / "1" / NAME).write_text(json.dumps(about, indent=1))
    return sizes


def check(bundle: Path) -> tuple[list[Path], list[str]]:
    """Return (complete files, names of missing or damaged files)."""
    about = json.loads((bundle / "1" / NAME).read_text())
    good, bad = [], []
    for name, file in about.items():
        path = bundle / name
        whole = path.is_file() and path.stat().st_size == file["bytes"] and _sha256(path) == file["sha256"]
        (good.append(path) if whole else bad.append(name))
    return good, bad


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(first: Path) -> int:
    good, bad = check(first.parent)
    for name in bad:
        print(f"missing or damaged, and left out: {name}", file=sys.stderr)
    print("\n".join(str(path) for path in good if path.suffix == ".whl"))
    return int(any(name.startswith(f"{first.name}/") for name in bad))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
