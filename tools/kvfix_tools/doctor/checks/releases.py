"""Do these releases of vLLM and LMCache go together, for this connector."""

from __future__ import annotations

from collections.abc import Iterator

from kvfix_tools.doctor import fit
from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.connectors import Connector
from kvfix_tools.doctor.definitions import VLLM_CONNECTORS
from kvfix_tools.doctor.packages import Package
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.lab import releases
from kvfix_tools.lab.options import KNOWN

IN_PROCESS = "lmcache.integration.vllm.vllm_v1_adapter"
MULTI_PROCESS = "lmcache.integration.vllm.lmcache_mp_connector"
#: Shown of one pair; the rest is counted.
_SHOWN = 3


@check("releases", essential=True)
def together(setup: Setup) -> Iterator[Line]:
    """vLLM and LMCache go together for the connector: what one imports the other has, and takes the arguments it gets.
    Read from the installed files; then which pairs the lab has run."""
    vllm, lmcache = setup.vllm, setup.lmcache
    if vllm is None or lmcache is None:
        lacks = "vLLM" if vllm is None else "LMCache"
        yield unchecked(f"whether the releases go together: {lacks} is not installed here")
        return
    connectors = [each for each in setup.connectors if each.is_v1 or each.is_mp]
    if not connectors and not (setup.command and setup.connectors):
        connectors = [
            Connector("LMCacheConnectorV1", "", {}, "", {})
        ]  # without a requirement: the one that all releases have
    for connector in connectors:
        if connector.extra.get("use_native"):
            yield unchecked(f"{connector.name}: use_native takes vLLM's copy of LMCache, which kvfix does not know")
            continue
        kind, found = _read(setup, connector, vllm, lmcache)
        pair = (
            f"{vllm.title} and {lmcache.title} ({connector.name}{', as vLLM has it' if kind == 'mp-in-tree' else ''})"
        )
        if found:
            shown = "; ".join(f"{each.what} ({each.where})" for each in found[:_SHOWN])
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield problem(f"{pair} do not go together: {shown}{more}", _remedy(kind, connector))
            continue
        versions = {"vllm": vllm.version, "lmcache": lmcache.version}
        why = releases.cannot_play(kind, versions) if all(versions.values()) else "a release is not known"
        if why:
            yield unchecked(f"{pair}: nothing is missing as far as the code can be read, but {why}")
        else:
            yield ok(f"{pair} go together")


def _read(setup: Setup, connector: Connector, vllm: Package, lmcache: Package) -> tuple[str, list[fit.Misfit]]:
    """(kind of connector as the lab calls it, what does not fit)"""
    own = f"{VLLM_CONNECTORS}.{'lmcache_connector' if connector.is_v1 else 'lmcache_mp_connector'}"
    if connector.is_v1:
        missing = [] if lmcache.file(IN_PROCESS) else [fit.Misfit(f"{own}", f"No module named '{IN_PROCESS}'")]
        return "v1", [*missing, *fit.misfits((vllm, own), lmcache), *fit.misfits((lmcache, IN_PROCESS), vllm)]
    theirs = fit.misfits((lmcache, MULTI_PROCESS), vllm)
    if connector.module.startswith("lmcache"):
        return "mp", fit.misfits((lmcache, connector.module), vllm)
    ours = fit.misfits((vllm, own), lmcache)
    # vLLM takes LMCache's class if it can be imported (lmcache_mp_connector.py 0.32.0:1010). Its own module has to be
    # imported for that in any case.
    prefers = "_resolve_lmcache_mp_connector" in vllm.text(own) and not setup.environment.get("LMCACHE_USE_UPSTREAM_MP")
    if prefers and lmcache.file(MULTI_PROCESS) and not any(_is_import(each) for each in theirs):
        return "mp", [*(each for each in ours if _is_import(each)), *theirs]
    return "mp-in-tree", ours


def _is_import(each: fit.Misfit) -> bool:
    return each.what.startswith(("No module", "cannot import"))


def _remedy(kind: str, connector: Connector) -> str:
    needs = KNOWN[kind].needs
    wanted = ", ".join(f"{dist}{specifier}" for dist, (specifier, _) in needs.items())
    if kind == "mp-in-tree":
        both = KNOWN["mp"].needs
        better = ", ".join(f"{dist}{specifier}" for dist, (specifier, _) in both.items())
        return f"install {better}, and leave LMCACHE_USE_UPSTREAM_MP unset; vLLM's own copy runs with {wanted} only"
    return f"install {wanted}: tried pairs are in the matrix of kvfix's documentation"
