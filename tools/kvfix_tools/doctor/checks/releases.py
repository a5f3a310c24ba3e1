"""The check that the installed vLLM and LMCache work together with the connector."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from kvfix import applicability
from kvfix_tools.doctor.checks import Line, check, ok, problem, unchecked
from kvfix_tools.doctor.connectors import Connector
from kvfix_tools.doctor.definitions import VLLM_CONNECTORS
from kvfix_tools.doctor.packages import Package
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.lab import releases
from kvfix_tools.lab.options import KNOWN

#: How a reason of the lab ends for releases that may work.
_MAY_WORK = "not tried"


@check("releases", essential=True)
def together(setup: Setup) -> Iterator[Line]:
    """The installed vLLM and LMCache work together with the connector: the lab has run such releases."""
    vllm, lmcache = setup.vllm, setup.lmcache
    if vllm is None or lmcache is None:
        lacks = "vLLM" if vllm is None else "LMCache"
        yield unchecked(f"{lacks} is not installed here, so kvfix cannot tell whether the releases work together")
        return
    connectors = [each for each in setup.connectors if each.is_v1 or each.is_mp]
    if not connectors and not (setup.command and setup.connectors):
        connectors = [Connector("LMCacheConnectorV1", "", {}, "", {})]  # all releases have this connector
    for connector in connectors:
        if connector.extra.get("use_native"):
            yield unchecked(f"{connector.name}: use_native uses vLLM's copy of LMCache, which kvfix cannot check")
        elif not vllm.version or not lmcache.version:
            yield unchecked(f"{vllm.title} and {lmcache.title}: a release is unknown")
        else:
            yield _pair(setup, connector, vllm, lmcache)


def _pair(setup: Setup, connector: Connector, vllm: Package, lmcache: Package) -> Line:
    kind = _kind(setup, connector, vllm, lmcache)
    pair = f"{vllm.title} and {lmcache.title} ({connector.name}{', copy in vLLM' if kind == 'mp-in-tree' else ''})"
    versions = {"vllm": vllm.version, "lmcache": lmcache.version}
    needs = KNOWN[kind].needs.items()
    lacks = [why for dist, (wanted, why) in needs if not releases.matches(versions[dist], wanted)]
    if lacks and not any(why.endswith(_MAY_WORK) for why in lacks):
        return problem(f"{pair} do not work together: the connector fails at its import or its start", _remedy(kind))
    if lacks:
        return unchecked(f"{pair}: {releases.cannot_play(kind, versions)}")
    for package in (vllm, lmcache):
        newest = applicability.fingerprints()[package.name]["releases"][-1]
        if Version(Version(package.version).public) > Version(newest):
            return unchecked(f"{pair}: kvfix does not know {package.title}, only releases up to {newest}")
    return ok(f"{pair} work together")


def _kind(setup: Setup, connector: Connector, vllm: Package, lmcache: Package) -> str:
    """Return the lab's name of the connector.

    vLLM uses LMCache's class if it can be imported, and its own copy otherwise (lmcache_mp_connector.py 0.32.0:1010).
    """
    if connector.is_v1:
        return "v1"
    may = "_resolve_lmcache_mp_connector" in vllm.text(f"{VLLM_CONNECTORS}.lmcache_mp_connector")
    may = may and not setup.environment.get("LMCACHE_USE_UPSTREAM_MP")
    has_own = lmcache.file(KNOWN["mp"].module or "") is not None
    return "mp" if connector.module.startswith("lmcache") or (may and has_own) else "mp-in-tree"


def _remedy(kind: str) -> str:
    wanted = {each: ", ".join(f"{dist}{specifier}" for dist, (specifier, _) in KNOWN[each].needs.items())
              for each in (kind, "mp")}  # fmt: skip
    if kind == "mp-in-tree":
        return (
            f"install {wanted['mp']}, and unset LMCACHE_USE_UPSTREAM_MP. vLLM's own copy works with {wanted[kind]} only"
        )
    return f"install {wanted[kind]}. The matrix in kvfix's documentation shows tested pairs"
