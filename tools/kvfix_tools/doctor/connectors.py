"""The connectors that a KV-transfer configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Connector(NamedTuple):
    """One connector of the KV-transfer configuration. Each child of a MultiConnector is one too."""

    name: str
    role: str
    extra: dict[str, Any]
    module: str  # kv_connector_module_path
    keys: dict[str, Any]  # as the user wrote them

    @property
    def is_v1(self) -> bool:
        """True for LMCache in the engine's own process."""
        return self.name.startswith("LMCacheConnector")

    @property
    def is_mp(self) -> bool:
        return self.name.startswith("LMCacheMPConnector")


def read(transfer: dict[str, Any]) -> Iterator[Connector]:
    """Yield the connector, then the children of a MultiConnector."""
    extra = transfer.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, dict) else {}
    name, role = str(transfer.get("kv_connector") or ""), str(transfer.get("kv_role") or "")
    yield Connector(name, role, extra, str(transfer.get("kv_connector_module_path") or ""), transfer)
    children = extra.get("connectors")
    if name == "MultiConnector" and isinstance(children, list):
        for child in children:
            if isinstance(child, dict):
                yield from read(child)
