"""Read the state of a running engine as plain data: call `collect()` in one of the engine's processes.

`collect()` may run at any point of the main thread, even inside a step. Therefore `collect()` changes nothing, takes no
lock, imports no new module, does not wait and does not raise. `kvfix look` loads this package in a process without
kvfix. Therefore the package imports only the standard library and, by relative names, its own modules.

The state contains counts and request ids and, with `full`, ids and hashes of blocks. The state contains no tokens,
prompts or host names. Unknown values are None. `mono` and `wall` are in ns. `arrived` and `since` are ages in seconds.

    {"schema": 1, "pid": 1, "process": "EngineCore", "mono": 12, "wall": 34, "milliseconds": 2.1,
     "versions": {"vllm": "0.32.0", "lmcache": "0.5.6"},
     "kvfix": {"mode": "observe", "version": "0.1.0", "fixes": ["KVF001"]} or None,
     "stack": ["recv (zmq/sugar/socket.py:980)", ...],  the 24 innermost calls of the main thread
     "hook": "get_num_new_matched_tokens",              the connector hook that the main thread runs; "" if none
     "in_step": True,                                   a scheduler step is running, and the queues are incomplete
     "scheduler": {...} or None,                        see scheduler.py
     "connectors": [{...}],                             a row for each connector of the scheduler and of the worker
     "unread": {"scheduler": "AttributeError ..."}}     {field that could not be read: error}

Each connector has this row. A MultiConnector has no row, but each of its children has one:

    {"class": "LMCacheMPConnector", "role": "SCHEDULER", "engine": "0a1b2", "rank": 0, "ranks": 2, "chunk_size": 256,
     "healthy": True,            the LMCache server answers pings, or LMCache runs in this process; None: not known
     "why": "ValueError",        type of the exception with which the start of LMCache failed
     "lookup_timeout": 3.0,      seconds
     "server_ports": [5555],     scheduler: ports of the LMCache servers
     "requests": {id: {...}},    scheduler: "lookup", "hit", "promised", "granted", "stored", "phase", "since"
     "loads": [id], "stores": [id],    worker: transfers that have begun and are not reported as ended
     "answered": [id],           worker: loads and stores that have ended, and that the next step will report
     "unreported": [id],         worker: dropped loads, and stores of ended requests, that are not reported yet
     "failed_blocks": 0,         worker: number of blocks of failed loads that are not reported yet
     "pins": {id: 3},            worker, LMCache in process: number of chunks that a lookup has pinned
     "fetched": [id],            worker, LMCache in process: requests whose chunks an asynchronous lookup has fetched
     "threads": {"lookup_server": True}}   worker, LMCache in process: True if the thread for lookups is running
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import lmcache_readers, places
from . import scheduler as schedulers

#: The version of the state's format. The version increases when a name is removed or changes its meaning.
SCHEMA = 1


def collect(
    full: bool = False, scheduler: Any = None, workers: Sequence[Any] = (), calls: Sequence[places.Call] | None = None
) -> dict[str, Any]:
    """Return the state of this process.

    full: include the ids and hashes of each request's blocks, so that `kvfix lab` can rebuild the request.
    scheduler: vLLM's scheduler. workers: the connectors of the workers. By default, `collect` searches the process.
    calls: the main thread's stack, if another thread calls `collect`. By default, `collect` reads its own stack.
    """
    began = time.perf_counter()
    unread: dict[str, str] = {}

    def read(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  an error here must not stop the engine
            unread[what] = places.where(error)
            return None

    frames = (read("frames", places.frames) or []) if calls is None else []
    calls = places.calls(frames) if calls is None else calls
    engine = None
    if scheduler is None:
        engine = read("engine", places.engine, frames)
        scheduler = getattr(engine, "scheduler", None)
    found = [getattr(scheduler, "connector", None), *(workers or [read("worker", places.worker_connector)])]
    held = read("connectors", _rows, found)
    events = read("recorder", places.recorded) or {}
    state = {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "process": read("process", places.process_name),
        "mono": time.monotonic_ns(),
        "wall": time.time_ns(),
        "versions": read("versions", places.versions),
        "kvfix": read("kvfix", places.kvfix),
        "stack": read("stack", places.stack, calls[:24]),
        "hook": read("hook", places.hook, calls),
        "in_step": read("in_step", places.in_step, calls),
        "scheduler": read("scheduler", schedulers.read, scheduler, engine, _by_request(held or ()), events, full),
        "connectors": held,
        "unread": unread,
    }
    return {**state, "milliseconds": round((time.perf_counter() - began) * 1e3, 3)}


def _rows(connectors: Iterable[Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in connectors:
        children = getattr(each, "_connectors", None)
        if isinstance(children, list | tuple) and children:
            rows += _rows(children)
        elif each is not None:
            rows.append(_one(each))
    return rows


def _by_request(connectors: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return {request id: row}. If several connectors have a row, take the row with the most promised tokens."""
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
    except Exception as error:  # noqa: BLE001  kvfix may not know this release of LMCache
        state["unread"] = places.where(error)
    return state


def place(connector: Any) -> dict[str, Any]:
    """Return the connector's engine, data-parallel replica, rank and number of ranks, or {} if a value cannot be read.

    All processes of an engine have the same `engine_id` (vllm/config/kv_transfer.py 0.32.0). A scheduler is rank 0.
    """
    try:
        config = connector._vllm_config
        parallel = config.parallel_config
        return {
            "engine": str(config.kv_transfer_config.engine_id),
            "replica": int(getattr(parallel, "data_parallel_rank", 0)),
            "rank": int(parallel.rank),
            "ranks": int(parallel.world_size),
        }
    except Exception:  # noqa: BLE001  optional fields
        return {}
