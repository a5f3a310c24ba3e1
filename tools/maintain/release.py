"""`make release`: source archive and wheel in dist/, and the wheel tried in an empty environment.

    python -m maintain.release [FOLDER]

The wheel is built from the source archive, as whoever has only that would. Exit 1 if what is installed from it does not
work.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of an engine that died of KVF001.
LOG = ROOT / "tests/diagnose/logs/crash-0.3.10.log.gz"


def build(folder: Path) -> tuple[Path, Path]:
    """(source archive, wheel), made in this folder. Raises subprocess.CalledProcessError."""
    sdist = _built(ROOT, "sdist", folder)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (tree,) = Path(unpacked).iterdir()
        return sdist, _built(tree, "wheel", folder)


def _built(tree: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder.resolve())]
    done = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return folder / done.stdout.strip().splitlines()[-1].rpartition("/")[2]


def install(wheel: Path, environment: Path) -> Path:
    """The programs of a new environment with this wheel in it; what it needs comes from pip's index."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    subprocess.run([str(programs / "python"), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    return programs


def failures(programs: Path, version: str) -> Iterator[str]:
    """What does not work of kvfix installed there, without vLLM and LMCache."""
    log = gzip.decompress(LOG.read_bytes())
    tried = (
        (["kvfix", "--version"], 0, f"kvfix {version}"),
        (["kvfix", "status"], 0, "Run it where the engine runs"),
        (["kvfix-diagnose", "-"], 1, "SUMMARY: kvfix-diagnose: KVD101"),
    )
    for (program, *arguments), code, text in tried:
        done = subprocess.run([str(programs / program), *arguments], input=log, capture_output=True, check=False)
        if done.returncode != code or text not in done.stdout.decode():
            yield f"{program} {' '.join(arguments)}: exit {done.returncode}\n{(done.stdout + done.stderr).decode()}"


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "dist"
    sdist, wheel = build(folder)
    with tempfile.TemporaryDirectory() as place:
        found = list(failures(install(wheel, Path(place, "venv")), wheel.name.split("-")[1]))
    print("\n".join([*found, str(sdist), f"{wheel}: {'does not work' if found else 'tried in an empty environment'}"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
