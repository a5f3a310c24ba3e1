"""`make gpu-bundle`: make folders with everything that a GPU host without a package index needs (README.md).

    python -m maintain gpu.bundle [FOLDER]

Folder 1 holds kvfix, LMCache, the Python part of vLLM, small packages and the scripts. Folders 2 and 3 hold compiled
files of vLLM.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from maintain import release

ROOT = Path(__file__).parents[3]
LIMIT = 60 << 20  # Maximum bytes of a folder. One transfer to the host has at most 64 MiB.
#: Platforms of the host. pip accepts a wheel for an older glibc only if the command names this older platform too.
PYTHON, PLATFORMS = "3.12", ("manylinux2014", *(f"manylinux_2_{glibc}" for glibc in range(39, 4, -1)))
FOLDERS = {"vllm_operations": "2", "vllm_flash_attention": "3"}  # {part of vLLM with its own folder: the folder}
SCRIPTS = ("__init__.py", "gpu/*.py", "gpu/run.sh")  # files below tools/maintain
#: {files of vLLM's wheel to leave out: why the GPU tests (the stages in README.md) do not need them}
LEFT_OUT = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.*": "FlashAttention 2, 129 MB. The stages use Triton attention",
    "vllm/_moe_C_*": "mixture of experts. The model of the stages is dense",
    "vllm/_flashmla*": "multi-head latent attention, which the model of the stages does not use",
    "vllm/_qutlass_C.*": "a quantization that the model of the stages does not use",
    "vllm/third_party/deep_gemm/*": "FP8 matrix products",
    "vllm/third_party/fmha_sm100/*": "attention for Blackwell",
    "vllm/third_party/tml_fa4/*": "FlashAttention 4",
    "vllm/vllm-rs": "the server in Rust. The stages use the one in Python",
}
#: {files of vLLM's wheel: name of the separate wheel with these files}. The whole wheel exceeds LIMIT.
APART = {
    "vllm/_C_stable_libtorch.*": "vllm_operations",  # swap_blocks_batch, and operations that every model runs
    # On CUDA, vLLM always imports FlashAttention 2 or 3 (0.26.0 v1/attention/backends/fa_utils.py:23).
    "vllm/vllm_flash_attn/_vllm_fa3_C.*": "vllm_flash_attention",
}


def download(folder: Path) -> None:
    """Download the wheels of wheels.txt without their dependencies. Raise CalledProcessError if pip fails."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(folder)]
    subprocess.run([*command, "-r", str(Path(__file__).with_name("wheels.txt"))], check=True)


def make(folder: Path, wheels: list[Path]) -> dict[str, int]:
    """Copy wheels and scripts to subfolders. Return {subfolder: bytes}. Raise ValueError if a folder is above LIMIT."""
    for wheel in wheels:
        into = folder / FOLDERS.get(wheel.name.partition("-")[0], "1")
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, into)
    scripts = ROOT / "tools/maintain"
    for source in [path for pattern in SCRIPTS for path in scripts.glob(pattern)]:
        copy = folder / "1/maintain" / source.relative_to(scripts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    sizes: dict[str, int] = {}
    for each in folder.iterdir():
        sizes[each.name] = size = sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
        if size > LIMIT:
            raise ValueError(f"folder {each.name} has {size} bytes, more than {LIMIT}")
    return sizes


def split(wheel: Path, folder: Path, left_out: dict[str, str], apart: dict[str, str]) -> list[Path]:
    """Split this wheel into parts, and write the parts into the folder. Return the parts' paths, the main part first.

    pip can install each part, because the RECORD of a part names exactly the part's files. One call of pip installs all
    parts into one folder, where they are one package. Raise ValueError if a pattern matches no file of this release.
    """
    name, version, tag = wheel.name.removesuffix(".whl").split("-", 2)
    with zipfile.ZipFile(wheel) as whole:
        files = [file for file in whole.namelist() if not file.endswith("/")]
        if unknown := [pattern for pattern in (*left_out, *apart) if not any(fnmatch(file, pattern) for file in files)]:
            raise ValueError(f"{wheel.name} has no file that matches {unknown[0]}")
        parts: dict[str, dict[str, bytes]] = {name: {}}
        for file in files:
            if not any(fnmatch(file, pattern) for pattern in left_out):
                part = next((part for pattern, part in apart.items() if fnmatch(file, pattern)), name)
                parts.setdefault(part, {})[file] = whole.read(file)
    written = []
    for part, content in parts.items():
        info = f"{part}-{version}.dist-info"
        if part != name:
            content[f"{info}/WHEEL"] = parts[name][f"{name}-{version}.dist-info/WHEEL"]
            content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {part}\nVersion: {version}\n".encode()
        content[f"{info}/RECORD"] = b""
        rows = (f'"{file}",,\n' for file in content)  # quoted, because file names can have commas. pip needs no hash
        content[f"{info}/RECORD"] = "".join(rows).encode()
        written.append(folder / f"{part}-{version}-{tag}.whl")
        with zipfile.ZipFile(written[-1], "w", zipfile.ZIP_DEFLATED) as out:
            for file, data in content.items():
                out.writestr(file, data)
    return written


def main(folder: Annotated[Path, typer.Argument()] = ROOT / ".cache/gpu-bundle") -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        wheels = Path(place)
        release.build(wheels)
        download(wheels)
        (vllm,) = wheels.glob("vllm-*.whl")
        parts = wheels / "parts"
        parts.mkdir()
        split(vllm, parts, LEFT_OUT, APART)
        vllm.unlink()
        sizes = make(folder, sorted([*wheels.glob("*.whl"), *parts.glob("*.whl")]))
    for number, size in sorted(sizes.items()):
        print(f"{folder}/{number}  {size / (1 << 20):.1f} MiB")
