"""Read which requests the connectors of this process hold.

Each connector has a row, and so has each child of a MultiConnector:

    {"class": "LMCacheMPConnector", "role": "SCHEDULER", "engine": "0a1b2", "rank": 0, "ranks": 2, "chunk_size": 256,
     "healthy": True,            the server answers its pings; in process: LMCache runs; None: not known
     "why": "ValueError",        type of the error with which LMCache failed to start
     "lookup_timeout": 3.0,      seconds
     "server_ports": [5555],     scheduler, with an LMCache server
     "requests": {id: {...}},    scheduler: "lookup", "hit", "promised", "granted", "stored", "phase", "since"
     "loads": [id], "stores": [id],    worker: begun, and not reported as ended
     "answered": [id],           worker: loads and stores that have ended, to be reported in the next step
     "unreported": [id],         worker: other transfers that have ended and are not reported
     "failed_blocks": 0,         worker: blocks of failed loads that are not reported
     "pins": {id: 3},            worker, in process: number of chunks that a lookup has pinned
     "fetched": [id],            worker, in process: requests with chunks from an asynchronous lookup
     "threads": {"lookup_server": True}}   worker, in process: true if the thread that answers lookups runs
"""

from collections.abc import Iterable, Sequence
from typing import Any

from . import lmcache_readers
from .places import where


def read(connectors: Sequence[Any]) -> list[dict[str, Any]]:
    """Return one row for each connector, and for each child of a MultiConnector instead of the MultiConnector."""
    return [_one(each) for each in _with_children(connectors)]


def _with_children(connectors: Iterable[Any]) -> Iterable[Any]:
    for each in connectors:
        children = getattr(each, "_connectors", None)
        if isinstance(children, list | tuple) and children:
            yield from _with_children(children)
        else:
            yield each


def by_request(connectors: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return {request: its row}. If several connectors have a row, take the row with the largest promise."""
    found: dict[str, dict[str, Any]] = {}
    for connector in connectors:
        for name, row in (connector.get("requests") or {}).items():
            if name not in found or (row.get("promised") or 0) > (found[name].get("promised") or 0):
                found[name] = row
    return found


def _one(connector: Any) -> dict[str, Any]:
    role, at = getattr(getattr(connector, "role", None), "name", ""), place(connector)
    state: dict[str, Any] = {"class": type(connector).__name__, "role": str(role)}
    state |= {name: at.get(name) for name in ("engine", "rank", "ranks")}
    try:
        reader = lmcache_readers.reader(connector)
        if reader is not None:
            reader.add_state(state)
    except Exception as error:  # noqa: BLE001  a release that is not known
        state["unread"] = where(error)
    return state


def place(connector: Any) -> dict[str, Any]:
    """Return the connector's engine, data-parallel replica, rank and number of ranks; {} if it does not have them.

    All processes of an engine have the same `engine_id` (vllm/config/kv_transfer.py 0.32.0). A scheduler is rank 0.
    """
    try:
        config = connector._vllm_config
        parallel = config.parallel_config
        replica = getattr(parallel, "data_parallel_rank", 0)
        return {
            "engine": str(config.kv_transfer_config.engine_id),
            "replica": int(replica),
            "rank": int(parallel.rank),
            "ranks": int(parallel.world_size),
        }
    except Exception:  # noqa: BLE001  optional fields
        return {}
