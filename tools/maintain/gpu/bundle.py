"""`make gpu-bundle`: folders with all that a GPU host without a package index needs (README.md).

    python -m maintain.gpu.bundle [FOLDER]

Folder 1 holds kvfix, LMCache, the Python part of vLLM, small packages and the scripts. Folders 2 and 3 hold compiled
files of vLLM.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from maintain import release
from maintain.gpu import trimmed_wheel

ROOT = Path(__file__).parents[3]
#: Maximum bytes of a folder. The host takes 64 MiB in one transfer.
LIMIT = 60 << 20
#: Platforms of the host. pip accepts a wheel for an older glibc only if that platform is named too.
PYTHON, PLATFORMS = "3.12", ("manylinux2014", *(f"manylinux_2_{glibc}" for glibc in range(39, 4, -1)))
#: Parts of vLLM that have a folder of their own.
FOLDERS = {"vllm_operations": "2", "vllm_flash_attention": "3"}
#: Files below tools/maintain.
SCRIPTS = ("__init__.py", "gpu/*.py", "gpu/run.sh")


def download(folder: Path) -> None:
    """Download the wheels of wheels.txt, without their dependencies. Raises subprocess.CalledProcessError."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(folder)]
    subprocess.run([*command, "-r", str(Path(__file__).with_name("wheels.txt"))], check=True)


def make(folder: Path, wheels: list[Path]) -> dict[str, int]:
    """Put these wheels and the scripts into subfolders of `folder`. Return the bytes of each subfolder.

    Raises ValueError if a folder is larger than LIMIT.
    """
    for wheel in wheels:
        into = folder / FOLDERS.get(wheel.name.partition("-")[0], "1")
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, into)
    scripts = ROOT / "tools/maintain"
    for source in [path for pattern in SCRIPTS for path in scripts.glob(pattern)]:
        copy = folder / "1/maintain" / source.relative_to(scripts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    sizes = {
        each.name: sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in folder.iterdir()
    }
    for number, size in sizes.items():
        if size > LIMIT:
            raise ValueError(f"folder {number} has {size} bytes, more than {LIMIT}")
    return sizes


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / ".cache/gpu-bundle"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        wheels = Path(place)
        release.build(wheels)
        download(wheels)
        (vllm,) = wheels.glob("vllm-*.whl")
        parts = wheels / "parts"
        parts.mkdir()
        trimmed_wheel.split(vllm, parts, trimmed_wheel.LEFT_OUT, trimmed_wheel.APART)
        vllm.unlink()
        sizes = make(folder, sorted([*wheels.glob("*.whl"), *parts.glob("*.whl")]))
    for number, size in sorted(sizes.items()):
        print(f"{folder}/{number}  {size / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
