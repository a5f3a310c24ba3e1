"""Check that the installed packages work together, and that their compiled code loads on this machine."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from kvfix_tools.doctor import fit
from kvfix_tools.doctor.checks import Line, check, ok, problem, remedy, unchecked
from kvfix_tools.doctor.command_line import Connector
from kvfix_tools.doctor.definitions import READERS, VLLM_CONNECTORS
from kvfix_tools.doctor.packages import Package
from kvfix_tools.doctor.setup import OPERATIONS, Setup
from kvfix_tools.lab import releases
from kvfix_tools.lab.options import KNOWN

_WHERE = "run kvfix doctor where the engine runs: in its container, with its Python"
_AGAIN = "kvfix doctor again, when the machine is less busy"
IN_PROCESS = "lmcache.integration.vllm.vllm_v1_adapter"
MULTI_PROCESS = "lmcache.integration.vllm.lmcache_mp_connector"
_SHOWN = 3  # maximum number of misfits (wrong imports or calls) to list. The report counts the other misfits


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
    """The program of the command runs with the Python of kvfix doctor, so kvfix doctor checks the right packages."""
    name = setup.command.executable
    path = shutil.which(name, path=setup.environment.get("PATH")) if name else None
    if not path or not name.endswith(("vllm", "lmcache")):
        return
    try:
        with open(path, "rb") as file:
            found = re.fullmatch(r"#!\s*(\S*python\S*)\s*", file.readline(300).decode(errors="replace"))
    except OSError:
        return
    if found and Path(found[1]).parent != Path(sys.executable).parent:
        what = f"{path} runs with {found[1]}, but kvfix doctor checked the installation of {sys.executable}"
        yield unchecked(what, f"{found[1]} -m kvfix_tools.cli doctor -- ..., after installing kvfix for this Python")


@check("torch")
def torch(setup: Setup) -> Iterator[Line]:
    """The installed torch is a release that vLLM and LMCache require."""
    found = setup.packages.get("torch")
    for package in (setup.vllm, setup.lmcache):
        wanted = _wanted(package, "torch") if package else None
        if package is None or wanted is None or not str(wanted.specifier):
            continue
        if found is None or not found.version:
            what = f"{package.title} needs torch{wanted.specifier}, but torch is not installed"
            yield problem(what, f'pip install "torch{wanted.specifier}"')
        elif not _satisfies(wanted, found.version):
            what = f"{package.title} is built for torch{wanted.specifier}; torch {found.version} is installed"
            do = f'pip install "torch{wanted.specifier}", or a build of {package.name} for torch {found.version}'
            yield problem(what, do)
        else:
            yield ok(f"torch {found.version} is a release that {package.title} requires")


def _wanted(package: Package, name: str) -> Requirement | None:
    for line in package.needs:
        with suppress(InvalidRequirement):
            each = Requirement(line)
            if each.name == name and (each.marker is None or each.marker.evaluate({"extra": ""})):
                return each
    return None


def _satisfies(wanted: Requirement, version: str) -> bool:
    """Return True if `wanted` allows the version. Ignore local parts (+cu130, +cpu) that only PyTorch's wheels have."""
    specifier = re.sub(r"\+[\w.]+", "", str(wanted.specifier))
    return Requirement(f"{wanted.name}{specifier}").specifier.contains(version.partition("+")[0], prereleases=True)


@check("extensions", essential=True)
def loads(setup: Setup) -> Iterator[Line]:
    """The compiled extensions of vLLM and LMCache load with this torch. A child process loads the extensions."""
    for file in _operations(setup):
        suffix = file.name[file.name.index(".") :]
        if suffix not in EXTENSION_SUFFIXES:
            here = f"{sys.version_info.major}.{sys.version_info.minor}"
            what = f"{_name(file)} is built for another Python ({suffix}), not for {here}"
            yield problem(what, f"{sys.executable} -m pip install --force-reinstall --no-deps lmcache")
    if not setup.vllm and not setup.lmcache:
        yield unchecked("neither vLLM nor LMCache is installed", _WHERE)
        return
    if setup.packages.get("torch") is None:
        yield unchecked(f"torch is not installed for {sys.executable}", _WHERE)
        return
    tried = setup.tried
    if tried.torch is None:
        if tried.why.startswith("loading did not finish"):
            yield unchecked(f"import torch: {tried.why}", _AGAIN)
        else:
            what = f"import torch fails: {tried.why}"
            yield problem(what, "pip install --force-reinstall torch, in a build for the CUDA of this machine")
        return
    built = f"torch {tried.torch['version']}"
    for file in setup.libraries:
        name = _name(file)
        error = tried.errors.get(str(file))
        if error is None:
            yield unchecked(f"{name}: {tried.why or 'not tried'}", _AGAIN)
        elif not error:
            yield ok(f"{name} loads with {built}")
        else:
            yield _failed(name, error, built, tried.torch["cuda"])
    if setup.lmcache and tried.torch["cuda"] and not _operations(setup):
        yield problem(
            f"{setup.lmcache.title} has no compiled operations ({' or '.join(OPERATIONS)}): it was built without CUDA",
            remedy("KVD714"),
        )


def _operations(setup: Setup) -> list[Path]:
    return [file for file in setup.libraries if file.name.partition(".")[0] in OPERATIONS]


def _name(file: Path) -> str:
    return f"{file.parent.name}.{file.name.partition('.')[0]}"


def _failed(name: str, error: str, torch: str, cuda: str | None) -> Line:
    again = remedy("KVD701" if name.startswith("lmcache.") else "KVD712")
    missing = re.search(r"(lib[\w.+-]+): cannot open shared object file", error)
    if symbol := re.search(r"undefined symbol: (\S+)", error):
        return problem(f"{name} is not built for {torch} (undefined symbol {symbol[1]})", again)
    if missing and re.search("cud|nv|c10_cuda|torch_cuda|hip|roc", missing[1]):
        if not cuda:
            what = f"{name} needs {missing[1]}, but {torch} is built for the CPU"
            return unchecked(what, "run kvfix doctor on the machine that has the GPU")
        return problem(f"{name} needs {missing[1]}, but {torch} is built for CUDA {cuda}", again)
    if missing:
        return problem(f"{name} needs {missing[1]}, which is not on this machine", f"install {missing[1]}, or {again}")
    if "SIGILL" in error:
        what = f"{name} has instructions that this processor does not have (SIGILL)"
        return problem(what, "install a build for this processor; lscpu shows its instructions")
    return problem(f"{name} does not load with {torch}: {' '.join(error.split())[:300]}", again)


@check("gpu")
def gpu(setup: Setup) -> Iterator[Line]:
    """torch can use the GPU of this machine."""
    facts = setup.tried.torch if setup.packages.get("torch") and (setup.vllm or setup.lmcache) else None
    if facts is None:
        return
    cuda = facts["cuda"]
    if not cuda:
        yield unchecked(f"torch {facts['version']} is built for the CPU, so the GPU cannot be checked")
    elif not facts["available"] and setup.machine.has_nvidia():
        do = f"nvidia-smi shows the driver's CUDA: install a driver for CUDA {cuda}, or a torch for the driver's CUDA"
        yield problem(f"torch {facts['version']} (CUDA {cuda}) cannot use the GPU of this machine", do)
    elif not facts["available"]:
        yield unchecked("this machine has no GPU", _WHERE)
    else:
        yield ok(f"torch {facts['version']} can use the GPU of this machine")


@check("releases", essential=True)
def together(setup: Setup) -> Iterator[Line]:
    """The installed vLLM and LMCache work together: imports exist, functions accept the arguments they get, and
    `kvfix lab` has run this pair of releases."""
    vllm, lmcache = setup.vllm, setup.lmcache
    if vllm is None or lmcache is None:
        lacks = "vLLM" if vllm is None else "LMCache"
        yield unchecked(f"{lacks} is not installed here, so kvfix cannot tell whether the releases work together")
        return
    connectors = setup.lmcache_connectors
    if not setup.connectors:
        connectors = [Connector("LMCacheConnectorV1", "", {}, "", {})]  # a connector that every release has
    for connector in connectors:
        if connector.extra.get("use_native"):
            yield unchecked(f"{connector.name}: use_native uses vLLM's copy of LMCache, which kvfix cannot check")
            continue
        kind, found = _read(setup, connector, vllm, lmcache)
        pair = f"{vllm.title} and {lmcache.title} ({connector.name}{', copy in vLLM' if kind == 'mp-in-tree' else ''})"
        if found:
            shown = "; ".join(f"{each.what} ({each.where})" for each in found[:_SHOWN])
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield problem(f"{pair} do not work together: {shown}{more}", _remedy(kind))
            continue
        versions = {"vllm": vllm.version, "lmcache": lmcache.version}
        why = releases.cannot_play(kind, versions) if all(versions.values()) else "a release is unknown"
        if why:
            yield unchecked(f"{pair}: the code shows no missing import or argument, but {why}")
        else:
            yield ok(f"{pair} work together")


def _read(setup: Setup, connector: Connector, vllm: Package, lmcache: Package) -> tuple[str, list[fit.Misfit]]:
    """Return (name that `kvfix lab` uses for the connector, misfits between vLLM and LMCache)."""
    own = f"{VLLM_CONNECTORS}.{READERS[connector.is_v1][1]}"
    if connector.is_v1:
        missing = [] if lmcache.file(IN_PROCESS) else [fit.Misfit(f"{own}", f"No module named '{IN_PROCESS}'")]
        return "v1", [*missing, *fit.misfits((vllm, own), lmcache), *fit.misfits((lmcache, IN_PROCESS), vllm)]
    theirs = fit.misfits((lmcache, MULTI_PROCESS), vllm)
    if connector.module.startswith("lmcache"):
        return "mp", fit.misfits((lmcache, connector.module), vllm)
    ours = fit.misfits((vllm, own), lmcache)
    # vLLM prefers LMCache's class (lmcache_mp_connector.py 0.32.0:1191), but always imports vLLM's module.
    resolves, in_tree = "_resolve_lmcache_mp_connector", setup.environment.get("LMCACHE_USE_UPSTREAM_MP")
    prefers = resolves in setup.packages.text(own) and not in_tree
    if prefers and lmcache.file(MULTI_PROCESS) and not any(_is_import(each) for each in theirs):
        return "mp", [*(each for each in ours if _is_import(each)), *theirs]
    return "mp-in-tree", ours


def _is_import(each: fit.Misfit) -> bool:
    return each.what.startswith(("No module", "cannot import"))


def _remedy(kind: str) -> str:
    wanted, better = (
        ", ".join(f"{dist}{specifier}" for dist, (specifier, _) in KNOWN[each].needs.items()) for each in (kind, "mp")
    )
    if kind == "mp-in-tree":
        return f"install {better}, and unset LMCACHE_USE_UPSTREAM_MP. vLLM's own copy works with {wanted} only"
    return f"install {wanted}. The matrix in kvfix's documentation shows tested pairs"
