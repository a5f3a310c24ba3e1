"""The connectors, roles and settings that a log names."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_line import LogLine

#: (text in a line or in a path of a traceback, its connector)
_MARKS = (
    (b"lmcache_mp_connector", "LMCacheMPConnector"),
    (b"vllm_multi_process_adapter", "LMCacheMPConnector"),
    (b"LMCache MP worker", "LMCacheMPConnector"),
    (b"vllm_v1_adapter", "LMCacheConnectorV1"),
    (b"lmcache_connector.py", "LMCacheConnectorV1"),
    (b"nixl_connector.py", "NixlConnector"),
    (b"kv_connector/v1/nixl", "NixlConnector"),
    (b"mooncake_store", "MooncakeStoreConnector"),
    (b"mooncake_connector", "MooncakeConnector"),
    (b"kv_connector/v1/mooncake/store", "MooncakeStoreConnector"),
    (b"kv_connector/v1/mooncake", "MooncakeConnector"),
    (b"p2p_nccl_connector", "P2pNcclConnector"),
    (b"offloading_connector", "OffloadingConnector"),
    (b"kv_connector/v1/offloading", "OffloadingConnector"),
    (b"v1/kv_offload", "OffloadingConnector"),
    (b"simple_kv_offload", "SimpleCPUOffloadConnector"),
    (b"simple_cpu_offload", "SimpleCPUOffloadConnector"),
    (b"multi_connector", "MultiConnector"),
    (b"moriio", "MoRIIOConnector"),
    (b"dynamo_llm::block_manager", "DynamoConnector"),
    (b"kvbm/vllm_integration", "DynamoConnector"),
)
_NAMED = re.compile(rb"kv_connector['\"]?\s*[=:]\s*['\"]?(\w+)|connector with name: (\w+)")
_ROLE = re.compile(rb"kv_role['\"]?\s*[=:]\s*['\"]?(kv_\w+)")


class WhoRan:
    def __init__(self) -> None:
        #: Names of vLLM's connector classes, e.g. "LMCacheConnectorV1".
        self.connectors: set[str] = set()
        self.roles: set[str] = set()
        #: True if a line is from vLLM, LMCache or their code.
        self.engine = False
        #: vLLM's line of its non-default arguments, cut to 4 kB; "" if the log has none.
        self.settings = ""

    @property
    def lmcache(self) -> bool:
        """True if LMCache may have run, judged by the connectors in the log."""
        return not self.connectors or any(name.startswith(("LMCache", "Multi")) for name in self.connectors)

    def take(self, line: LogLine) -> None:
        body = line.body
        self.engine = self.engine or _is_of_engine(line)
        if body.find(b"onnector") >= 0:
            connectors, roles = _named(body)
            self.connectors |= connectors
            self.roles |= roles
        if line.name == "settings":
            self.settings = self.settings or body[:4096].decode("utf-8", "replace")
            if b"'kv_offloading_size'" in body:
                lmcache = b"'kv_offloading_backend': 'lmcache'" in body
                self.connectors.add("LMCacheConnectorV1" if lmcache else "OffloadingConnector")
        if line.name == "raised":
            self.connectors |= _marked(" ".join(frame[0] for frame in line.fields["frames"]).encode())
        elif not self.connectors:
            self.connectors |= _marked(body)
        if line.name == "logged":  # `[nixl_connector.py:815] `
            self.connectors |= _marked(line.fields["place"].encode())


def _is_of_engine(line: LogLine) -> bool:
    if line.process or line.time is not None or line.fields.get("logger"):
        return True
    if line.name == "raised":
        return any(f"/{of}/" in f"/{frame[0]}" for frame in line.fields["frames"] for of in ("vllm", "lmcache"))
    return line.name not in ("logged", "died", "stack", "who")


@lru_cache(maxsize=256)
def _named(text: bytes) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of (connectors, roles) in a text."""
    connectors = frozenset(_plain(either[0] or either[1]) for either in _NAMED.findall(text))
    return connectors, frozenset(role.decode() for role in _ROLE.findall(text))


@lru_cache(maxsize=256)
def _marked(text: bytes) -> frozenset[str]:
    return frozenset(name for mark, name in _MARKS if mark in text)


def _plain(name: bytes) -> str:
    """Return the name of the connector, without suffixes as in LMCacheConnectorV1Dynamic."""
    text = name.decode("ascii", "replace")
    return "LMCacheConnectorV1" if text.startswith("LMCacheConnectorV1") else text
