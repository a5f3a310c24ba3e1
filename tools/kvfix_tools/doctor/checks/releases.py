"""The check that the installed vLLM and LMCache work together with the connector."""

from __future__ import annotations

from collections.abc import Iterator

from kvfix_tools.doctor import fit
from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.command_line import Connector
from kvfix_tools.doctor.definitions import VLLM_CONNECTORS
from kvfix_tools.doctor.packages import Package
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.lab import releases
from kvfix_tools.lab.options import KNOWN

IN_PROCESS = "lmcache.integration.vllm.vllm_v1_adapter"
MULTI_PROCESS = "lmcache.integration.vllm.lmcache_mp_connector"
#: Maximum number of misfits to show for one pair; the rest is counted.
_SHOWN = 3


@check("releases", essential=True)
def together(setup: Setup) -> Iterator[Line]:
    """The installed vLLM and LMCache work together: imports exist, functions accept the arguments they get, and the
    lab has run this pair of releases."""
    vllm, lmcache = setup.vllm, setup.lmcache
    if vllm is None or lmcache is None:
        lacks = "vLLM" if vllm is None else "LMCache"
        yield unchecked(f"{lacks} is not installed here, so kvfix cannot tell whether the releases work together")
        return
    connectors = setup.lmcache_connectors
    if not connectors and not (setup.command and setup.connectors):
        connectors = [Connector("LMCacheConnectorV1", "", {}, "", {})]  # all releases have this connector
    for connector in connectors:
        if connector.extra.get("use_native"):
            yield unchecked(f"{connector.name}: use_native uses vLLM's copy of LMCache, which kvfix cannot check")
            continue
        kind, found = _read(setup, connector, vllm, lmcache)
        pair = f"{vllm.title} and {lmcache.title} ({connector.name}{', copy in vLLM' if kind == 'mp-in-tree' else ''})"
        if found:
            shown = "; ".join(f"{each.what} ({each.where})" for each in found[:_SHOWN])
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield problem(f"{pair} do not work together: {shown}{more}", _remedy(kind, connector))
            continue
        versions = {"vllm": vllm.version, "lmcache": lmcache.version}
        why = releases.cannot_play(kind, versions) if all(versions.values()) else "a release is unknown"
        if why:
            yield unchecked(f"{pair}: the code shows no missing import or argument, but {why}")
        else:
            yield ok(f"{pair} work together")


def _read(setup: Setup, connector: Connector, vllm: Package, lmcache: Package) -> tuple[str, list[fit.Misfit]]:
    """Return (the lab's name of the connector, misfits)."""
    own = f"{VLLM_CONNECTORS}.{'lmcache_connector' if connector.is_v1 else 'lmcache_mp_connector'}"
    if connector.is_v1:
        missing = [] if lmcache.file(IN_PROCESS) else [fit.Misfit(f"{own}", f"No module named '{IN_PROCESS}'")]
        return "v1", [*missing, *fit.misfits((vllm, own), lmcache), *fit.misfits((lmcache, IN_PROCESS), vllm)]
    theirs = fit.misfits((lmcache, MULTI_PROCESS), vllm)
    if connector.module.startswith("lmcache"):
        return "mp", fit.misfits((lmcache, connector.module), vllm)
    ours = fit.misfits((vllm, own), lmcache)
    # vLLM uses LMCache's class if it can be imported (lmcache_mp_connector.py 0.32.0:1010). The import of vLLM's own
    # module must succeed in both cases.
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
        return f"install {better}, and unset LMCACHE_USE_UPSTREAM_MP. vLLM's own copy works with {wanted} only"
    return f"install {wanted}. The matrix in kvfix's documentation shows tested pairs"
