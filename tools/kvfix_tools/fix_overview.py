"""The connectors and the releases of each fix."""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix import applicability
from kvfix.fixes.api import Fix, Target

_V1, _MP = "LMCacheConnectorV1", "LMCacheMPConnector"
#: {prefix of a module name: connector}. The longest prefix wins. "": every connector.
_CONNECTORS = {
    "lmcache.": _V1,
    "lmcache.integration.vllm.lmcache_mp": _MP,
    "lmcache.integration.vllm.kv_cache_groups": _MP,
    "lmcache.integration.vllm.vllm_multi_process_adapter": _MP,
    "lmcache.v1.multiprocess": _MP,
    "vllm.v1.core.": "",
    "vllm.v1.kv_offload.": "OffloadingConnector",
    "vllm.v1.simple_kv_offload.": "SimpleCPUOffloadConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector": _MP,
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector": "MultiConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl": "NixlConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake": "MooncakeConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading": "OffloadingConnector",
}


def connectors(fix: Fix) -> frozenset[str]:
    """Return the connectors that have the bug; empty if the bug is in vLLM itself and concerns every connector."""
    found = {_connector(target.module) for target in fix.targets if not target.helper}
    return frozenset() if "" in found else frozenset(found)


def _connector(module: str) -> str:
    beginning = max((each for each in _CONNECTORS if module.startswith(each)), key=len, default="vllm.v1.core.")
    return _CONNECTORS[beginning]


@lru_cache(maxsize=512)
def wrong_releases(fix: Fix, dist: str) -> frozenset[str]:
    """Return the releases of whose code kvfix knows the fingerprint, and knows it to be wrong."""
    wrong = [target for target in fix.targets if target.dist == dist and not target.helper]
    broken = {target.name: SpecifierSet(target.broken, prereleases=True) for target in wrong}
    return frozenset(each for target in wrong for each in releases_with(target) if each in broken[target.name])


def first_right(fix: Fix, dist: str) -> str | None:
    """Return the release after the last one with the bug; None: there is none that kvfix knows."""
    wrong = wrong_releases(fix, dist)
    known = applicability.fingerprints()[dist]["releases"]
    return next((each for each in known if wrong and Version(each) > max(map(Version, wrong))), None)


def releases_with(target: Target) -> set[str]:
    """Return the releases that have this function."""
    known = applicability.fingerprints()[target.dist]["functions"].get(target.name, {})
    return {release for releases in known.values() for release in releases}
