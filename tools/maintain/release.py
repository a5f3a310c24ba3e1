"""`make release`: build source archive and wheel in dist/, and test the wheel in an empty environment.

    python -m maintain release [FOLDER]

The wheel is built from the source archive. A few commands run in an environment that has only the wheel, without vLLM
and LMCache. Exit 1 if a command does not work.
"""

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
#: The log of an engine that died because of the bug that KVF001 fixes.
LOG = ROOT / "tests/diagnose/logs/crash-0.3.10.log.gz"


def build(folder: Path) -> tuple[Path, Path]:
    """Build (source archive, wheel) in this folder. Raise subprocess.CalledProcessError if the build fails."""
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
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    subprocess.run([str(programs / "python"), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    return programs


def failures(programs: Path, version: str) -> Iterator[str]:
    """Yield each command that fails in this environment. One of the commands fails if the wheel contains `maintain`."""
    log = gzip.decompress(LOG.read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    no_maintain = ["python", "-c", "import importlib.util as u; print('maintain:', u.find_spec('maintain'))"]
    commands = (
        (["kvfix", "--version"], 0, f"kvfix {version}"),
        (["kvfix", "status"], 77, "Run kvfix status where the engine"),
        (["kvfix-diagnose", "-"], 1, "SUMMARY: kvfix-diagnose: KVD101"),
        (no_maintain, 0, "maintain: None"),
    )
    for (program, *arguments), code, text in commands:
        command = [str(programs / program), *arguments]
        done = subprocess.run(command, input=log, env=environment, capture_output=True, check=False)
        if done.returncode != code or text not in done.stdout.decode():
            yield f"{program} {' '.join(arguments)}: exit {done.returncode}\n{(done.stdout + done.stderr).decode()}"


def main(folder: Annotated[Path, typer.Argument()] = ROOT / "dist") -> int:
    sdist, wheel = build(folder)
    with tempfile.TemporaryDirectory() as place:
        found = list(failures(install(wheel, Path(place, "venv")), wheel.name.split("-")[1]))
    print("\n".join([*found, str(sdist), f"{wheel}: {'does not work' if found else 'tried in an empty environment'}"]))
    return int(bool(found))
