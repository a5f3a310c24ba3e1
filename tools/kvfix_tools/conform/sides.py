"""Stand-ins of the lab for vLLM's connectors whose workers need a GPU, a server or a library.

`kvfix conform` tests these connectors with the stand-in, and reports which part is a stand-in.
"""

from typing import Any, NamedTuple

from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS

_COPIES = "its copies between GPU and CPU memory are a stand-in"
_ENGINES = "there are two engines, and NIXL is a stand-in"


class Side(NamedTuple):
    connector: str  # option of the lab
    stand_in: str  # the part that is a stand-in; "" if unknown
    offloading: str = ""  # option of the lab

    @property
    def lacks(self) -> set[str]:
        """The keys of scenarios.NEEDS that the stand-in does not have."""
        has = {"groups"} if self.connector in ("mp", *OF_VLLM) and not self.offloading else set()
        has |= {"multi"} if self.connector in ("v1", "mp", "mp-in-tree") else set()
        has |= {"uncached"} if self.connector != "simple-offload" else set()
        has |= {"alone"} if self.connector not in PAIRS else set()
        return {"restart", "lose", "groups", "multi", "uncached", "alone"} - has


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
    """Return the stand-in for a connector by its name in vLLM or the lab; None if it is tested with its own code.

    config: for a MultiConnector, it has the children. The lab supports one LMCache connector together with the
    OffloadingConnector.
    """
    if connector == "MultiConnector":
        names = [str(child.get("kv_connector")) for child in config.get("connectors", ())]
        lmcache = [_SIDES[name] for name in names if name.startswith("LMCache") and name in _SIDES]
        if len(names) != 2 or len(lmcache) != 1 or "OffloadingConnector" not in names:
            return None
        place = "first" if names[0] == "OffloadingConnector" else "last"
        return lmcache[0]._replace(stand_in=f"{lmcache[0].stand_in}, and so are the copies", offloading=place)
    if connector in CONNECTORS:
        return next((each for each in _SIDES.values() if each.connector == connector), Side(connector, ""))
    found = _SIDES.get(connector)
    return found if found is not None and found.connector in CONNECTORS else None
