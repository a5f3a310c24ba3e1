"""Connectors of vLLM's that the lab has a side of its own for, because their workers want a GPU, a server or a library.

`kvfix conform` plays them through it, and says what is a stand-in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS

_COPIES = "its copies between GPU and CPU memory are a stand-in"
_ENGINES = "there are two engines, and NIXL is a model of it"


class Side(NamedTuple):
    """`connector`, `offloading`: of the lab's options. stand_in: what is not its own; "" where nothing is known."""

    connector: str
    stand_in: str
    offloading: str = ""

    @property
    def is_pair(self) -> bool:
        return self.connector in PAIRS

    @property
    def lacks(self) -> set[str]:
        """Of what scenarios need (scenario.NEEDS)."""
        has = {"groups"} if self.connector in ("mp", *OF_VLLM) and not self.offloading else set()
        has |= {"beside"} if self.connector in ("v1", "mp", "mp-in-tree") else set()
        has |= {"uncached"} if self.connector != "simple-offload" else set()
        has |= {"alone"} if self.connector not in PAIRS else set()
        return {"restart", "lose", "groups", "beside", "uncached", "alone"} - has


_SIDES = {
    "LMCacheConnectorV1": Side("v1", "its cache engine is a stand-in"),
    "LMCacheMPConnector": Side("mp", "its server is a stand-in"),
    "OffloadingConnector": Side("offloading", _COPIES),
    "SimpleCPUOffloadConnector": Side("simple-offload", _COPIES),
    "NixlConnector": Side("nixl-pull", _ENGINES),
    "NixlPullConnector": Side("nixl-pull", _ENGINES),
    "NixlPushConnector": Side("nixl-push", _ENGINES),
    "MooncakeConnector": Side("mooncake", "there are two engines, and Mooncake's transfer engine is a stand-in"),
}


def side(connector: str, config: dict[str, Any]) -> Side | None:
    """The lab's side for what vLLM calls so, or the lab; None: it is played as it is.

    config: of a MultiConnector, with its children. LMCache's beside the OffloadingConnector is what the lab knows.
    """
    if connector == "MultiConnector":
        return _of_two([str(child.get("kv_connector")) for child in config.get("connectors", ())])
    if connector in CONNECTORS:
        return next((each for each in _SIDES.values() if each.connector == connector), Side(connector, ""))
    found = _SIDES.get(connector)
    return found if found is not None and found.connector in CONNECTORS else None


def _of_two(names: list[str]) -> Side | None:
    lmcache = [_SIDES[name] for name in names if name.startswith("LMCache") and name in _SIDES]
    if len(names) != 2 or len(lmcache) != 1 or "OffloadingConnector" not in names:
        return None
    place = "first" if names[0] == "OffloadingConnector" else "last"
    return lmcache[0]._replace(stand_in=f"{lmcache[0].stand_in}, and so are the copies", offloading=place)
