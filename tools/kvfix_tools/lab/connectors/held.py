"""Find requests that an unknown connector keeps: search its objects for their ids."""

from collections import deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvfix_tools.lab.connectors.connector import OtherConnector

#: Maximum depth of the search.
_DEPTH = 4
_MANY = (dict, set, frozenset, list, tuple, deque)
#: Attributes that vLLM owns.
_NOT_ITS_OWN = {"_vllm_config", "_kv_transfer_config", "_kv_cache_config", "_kv_cache_manager", "_connector_metadata"}


def names(connector: Any, ids: set[str]) -> dict[str, set[str]]:
    """Return {place: ids found in it}, for the connector and the objects of its package that it refers to."""
    found: dict[str, set[str]] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [(type(connector).__name__, connector, 0)]
    packages: set[str] = set()
    while waiting:
        where, each, depth = waiting.pop()
        if id(each) in seen or depth > _DEPTH:
            continue
        seen.add(id(each))
        if isinstance(each, KVConnectorBase_V1):  # a child of a MultiConnector may be in another package
            kinds = [kind.__module__ for kind in type(each).__mro__ if issubclass(kind, KVConnectorBase_V1)]
            packages |= {module.rpartition(".")[0] or module for module in kinds}
        for name, value in _attributes(each):
            place = f"{where}.{name}"
            if isinstance(value, _MANY):
                if here := _among(value, ids):
                    found[place] = here
                inner = value.values() if isinstance(value, dict) else value
                waiting += [(place, one, depth + 1) for one in list(inner)[:64] if _is_its_own(one, packages)]
            elif _is_its_own(value, packages):
                waiting.append((place, value, depth + 1))
    return found


def _attributes(each: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(each, name)]
    own = {**getattr(each, "__dict__", {}), **{name: getattr(each, name) for name in slots}}
    return [(name, value) for name, value in own.items() if name not in _NOT_ITS_OWN]


def _is_its_own(value: Any, packages: set[str]) -> bool:
    module = type(value).__module__
    if isinstance(value, KVConnectorBase_V1):
        return not isinstance(value, OtherConnector)  # a class of the lab
    return hasattr(value, "__dict__") and any(module == each or module.startswith(f"{each}.") for each in packages)


def _among(many: Any, ids: set[str]) -> set[str]:
    """Return the ids that are keys or elements of this container, or elements of its elements."""
    here = {one for one in many if isinstance(one, str) and one in ids}
    inner = many.values() if isinstance(many, dict) else many
    for one in inner:
        if isinstance(one, (set, frozenset, list, tuple, deque)) and len(one) < 4096:
            here |= {name for name in one if isinstance(name, str) and name in ids}
        elif isinstance(one, str) and one in ids:
            here.add(one)
    return here
