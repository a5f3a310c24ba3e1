"""The installed packages, and whether their compiled code loads with this torch and on this GPU."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.packages import Package
from kvfix_tools.doctor.setup import OPERATIONS, Setup

_WHERE = "run kvfix doctor where the engine runs: in its container, with its Python"
#: Patterns of the error messages of dlopen.
_LIBRARY = re.compile(r"(lib[\w.+-]+): cannot open shared object file")
_SYMBOL = re.compile(r"undefined symbol: (\S+)")


@check("installed", essential=True)
def installed(setup: Setup) -> Iterator[Line]:
    """vLLM is installed for this Python, and LMCache too if the command needs it."""
    if setup.in_container:
        yield unchecked("the command starts a container, whose installation kvfix cannot see", _WHERE)
        return
    for name, package in (("vLLM", setup.vllm), ("LMCache", setup.lmcache)):
        if package:
            yield ok(f"{package.title} in {package.folder}")
        elif name == "LMCache" and setup.lmcache_connectors and setup.vllm:
            yield problem(f"the connector needs LMCache, but {sys.executable} has none", "pip install lmcache")
        else:
            yield unchecked(f"{name} is not installed for {sys.executable}", _WHERE)


@check("program")
def program(setup: Setup) -> Iterator[Line]:
    """The program of the command runs with this Python. Otherwise kvfix doctor checks another installation."""
    name = setup.command.executable if setup.command else ""
    path = shutil.which(name, path=setup.environment.get("PATH")) if name else None
    if not path or not name.endswith(("vllm", "lmcache")):
        return
    try:
        with open(path, "rb") as file:
            first = file.readline(300).decode(errors="replace").strip()
    except OSError:
        return
    python = first.removeprefix("#!").strip()
    if (
        first.startswith("#!")
        and "python" in python
        and " " not in python
        and Path(python).parent != Path(sys.executable).parent
    ):
        yield unchecked(
            f"{path} runs with {python}, but kvfix doctor checked the installation of {sys.executable}",
            f"{python} -m kvfix_tools.cli doctor -- ..., after installing kvfix for this Python",
        )


@check("torch")
def torch(setup: Setup) -> Iterator[Line]:
    """The installed torch is a release that vLLM and LMCache require."""
    found = setup.packages.get("torch")
    for package in (setup.vllm, setup.lmcache):
        wanted = _wanted(package, "torch") if package else None
        if package is None or wanted is None or not str(wanted.specifier):
            continue
        if found is None or not found.version:
            yield problem(
                f"{package.title} needs torch{wanted.specifier}, but torch is not installed",
                f'pip install "torch{wanted.specifier}"',
            )
        elif not _satisfies(wanted, found.version):
            yield problem(
                f"{package.title} is built for torch{wanted.specifier}; torch {found.version} is installed",
                f'pip install "torch{wanted.specifier}", or a build of {package.name} for torch {found.version}',
            )
        else:
            yield ok(f"torch {found.version} is a release that {package.title} requires")


def _wanted(package: Package, name: str) -> Requirement | None:
    for line in package.needs:
        try:
            each = Requirement(line)
        except InvalidRequirement:
            continue
        if each.name == name and (each.marker is None or each.marker.evaluate({"extra": ""})):
            return each
    return None


def _satisfies(wanted: Requirement, version: str) -> bool:
    """Compare without the local part (+cu130, +cpu), which only wheels of PyTorch's own index have."""
    specifier = re.sub(r"\+[\w.]+", "", str(wanted.specifier))
    return Requirement(f"{wanted.name}{specifier}").specifier.contains(version.partition("+")[0], prereleases=True)


@check("extensions", essential=True)
def loads(setup: Setup) -> Iterator[Line]:
    """The compiled extensions of vLLM and LMCache load with this torch. A child process loads them."""
    yield from _other_python(setup)
    if not setup.vllm and not setup.lmcache:
        yield unchecked("neither vLLM nor LMCache is installed", _WHERE)
        return
    if setup.packages.get("torch") is None:
        yield unchecked(f"torch is not installed for {sys.executable}", _WHERE)
        return
    tried = setup.tried
    if tried.torch is None:
        if tried.why.startswith("not done"):
            yield unchecked(f"import torch: {tried.why}", "kvfix doctor again, when the machine is less busy")
        else:
            yield problem(
                f"import torch fails: {tried.why}",
                "pip install --force-reinstall torch, in a build for the CUDA of this machine",
            )
        return
    built = f"torch {tried.torch['version']}"
    for file in setup.libraries:
        name = _name(file)
        error = tried.errors.get(str(file))
        if error is None:
            do = "kvfix doctor again, when the machine is less busy"
            yield unchecked(f"{name}: {tried.why or 'not tried'}", do)
        elif not error:
            yield ok(f"{name} loads with {built}")
        else:
            yield _failed(name, error, built, tried.torch["cuda"])
    if setup.lmcache and tried.torch["cuda"] and not _operations(setup):
        yield problem(
            f"{setup.lmcache.title} has no compiled operations ({' or '.join(OPERATIONS)}): it was built without CUDA",
            remedy("KVD714"),
        )


def _other_python(setup: Setup) -> Iterator[Line]:
    for file in _operations(setup):
        suffix = file.name[file.name.index(".") :]
        if suffix not in EXTENSION_SUFFIXES:
            yield problem(
                f"{_name(file)} is built for another Python ({suffix}), not for "
                f"{sys.version_info.major}.{sys.version_info.minor}",
                f"{sys.executable} -m pip install --force-reinstall --no-deps lmcache",
            )


def _operations(setup: Setup) -> list[Path]:
    return [file for file in setup.libraries if file.name.partition(".")[0] in OPERATIONS]


def _name(file: Path) -> str:
    return f"{file.parent.name}.{file.name.partition('.')[0]}"


def _failed(name: str, error: str, torch: str, cuda: str | None) -> Line:
    again = remedy("KVD701" if name.startswith("lmcache.") else "KVD712")
    missing, symbol = _LIBRARY.search(error), _SYMBOL.search(error)
    if symbol:
        return problem(f"{name} is built for another torch than {torch} (undefined symbol {symbol[1]})", again)
    if missing and re.search("cud|nv|c10_cuda|torch_cuda|hip|roc", missing[1]):
        if not cuda:
            return unchecked(
                f"{name} needs {missing[1]}, but {torch} is built for the CPU",
                "kvfix doctor, on the machine of the GPU",
            )
        return problem(f"{name} needs {missing[1]}, but {torch} is built for CUDA {cuda}", again)
    if missing:
        return problem(f"{name} needs {missing[1]}, which is not on this machine", f"install {missing[1]}, or {again}")
    if "SIGILL" in error:
        return problem(
            f"{name} has instructions that this processor does not have (SIGILL)",
            "install a build for this processor; lscpu shows its instructions",
        )
    return problem(f"{name} does not load with {torch}: {' '.join(error.split())[:300]}", again)


@check("gpu")
def gpu(setup: Setup) -> Iterator[Line]:
    """torch can use the GPU of this machine."""
    if setup.packages.get("torch") is None or not (setup.vllm or setup.lmcache):
        return
    facts = setup.tried.torch
    if facts is None:
        return
    if not facts["cuda"]:
        yield unchecked(f"torch {facts['version']} is built for the CPU, so the GPU cannot be checked")
    elif not facts["available"] and setup.machine.has_nvidia():
        yield problem(
            f"torch {facts['version']} (CUDA {facts['cuda']}) cannot use the GPU of this machine",
            f"nvidia-smi shows the driver's CUDA: install a driver for CUDA {facts['cuda']}, or a torch "
            "for the driver's CUDA",
        )
    elif not facts["available"]:
        yield unchecked("this machine has no GPU", _WHERE)
    else:
        yield ok(f"torch {facts['version']} can use the GPU of this machine")
