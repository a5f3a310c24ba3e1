"""Find the connectors and the releases that have the bug of a fix."""

import json as jsonlib
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from packaging.version import Version

from kvfix import applicability
from kvfix.fixes.record import Fix
from kvfix_tools import screen
from kvfix_tools.doctor import command_line

_V1, _MP = "LMCacheConnectorV1", "LMCacheMPConnector"
#: {prefix of a module name: connector}. The longest prefix wins. "" means every connector.
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
#: {alias of a connector in vLLM: name of the connector in _CONNECTORS}
_ALIASES = {
    "LMCacheConnectorV1Dynamic": _V1,
    "NixlPullConnector": "NixlConnector",
    "NixlPushConnector": "NixlConnector",
}
KNOWN = sorted({name for name in _CONNECTORS.values() if name} | set(_ALIASES))


def connectors(fix: Fix) -> frozenset[str]:
    """Return the connectors that have the bug. Return an empty set if the bug concerns every connector."""
    modules = {target.module for target in fix.targets if not target.helper}
    prefixes = [[each for each in _CONNECTORS if module.startswith(each)] for module in modules]
    found = frozenset(_CONNECTORS[max(each, key=len, default="vllm.v1.core.")] for each in prefixes)
    return frozenset() if "" in found else found


def concerns(fix: Fix, chosen: frozenset[str]) -> bool:
    """Return True if the bug can happen with one of these connectors. An empty `chosen` means all connectors."""
    mine = connectors(fix)
    return not chosen or not mine or bool(mine & chosen)


def in_use(named: str, transfer_config: str) -> tuple[frozenset[str], str]:
    """Return (connectors, the option or variable that names the connectors). Raise ValueError for a wrong value."""
    if named:
        return _checked(named.split(",")), "--connector"
    if transfer_config:
        return _checked(_of_config(transfer_config)), "--kv-transfer-config"
    if from_environment := os.environ.get("KVFIX_CONNECTOR", ""):
        return _checked(from_environment.split(",")), "KVFIX_CONNECTOR"
    return frozenset(), ""


def _of_config(text: str) -> list[str]:
    with suppress(ValueError, AttributeError):
        names = [each.name for each in command_line.connectors(jsonlib.loads(text))]
        if all(names):
            return names
    raise ValueError(
        f'--kv-transfer-config is not JSON with a key "kv_connector": {text[:80]!r}. '
        """Write it as for vLLM: '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'"""
    )


def _checked(names: Iterable[str]) -> frozenset[str]:
    found = set()
    for name in filter(None, (name.strip() for name in names)):
        if name not in KNOWN:
            hint = screen.did_you_mean(name, KNOWN) or f" kvfix has fixes for {', '.join(KNOWN)}."
            raise ValueError(f"unknown connector {name!r}.{hint}")
        found.add(_ALIASES.get(name, name))
    return frozenset(found)


@lru_cache(maxsize=512)
def wrong_releases(fix: Fix, dist: str) -> frozenset[str]:
    """Return the releases of `dist` that have the bug. Ignore releases whose code has no fingerprints in kvfix."""
    wrong = (applicability.wrong_releases(each) for each in fix.targets if each.dist == dist and not each.helper)
    return frozenset[str]().union(*wrong)


def first_right(fix: Fix, dist: str) -> str | None:
    """Return the first known release after the last release with the bug, or None."""
    wrong = wrong_releases(fix, dist)
    known = applicability.fingerprints()[dist]["releases"]
    return next((each for each in known if wrong and Version(each) > max(map(Version, wrong))), None)
