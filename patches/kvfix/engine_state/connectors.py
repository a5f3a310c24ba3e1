"""What a connector of this process holds of requests, by the attributes of LMCache's releases (0.3.9 to 0.5.6).

Of each connector, the children of a MultiConnector among them:

    {"class": "LMCacheMPConnector", "role": "SCHEDULER", "engine": "0a1b2", "rank": 0, "ranks": 2, "chunk_size": 256,
     "healthy": True,            the server answers its pings; in process: LMCache runs; None: it cannot tell
     "why": "ValueError",        type of the error with which LMCache failed to start
     "lookup_timeout": 3.0,      seconds
     "server_ports": [5555],     scheduler, with an LMCache server: where it is asked
     "requests": {id: {...}},    scheduler: "lookup", "hit", "promised", "granted", "stored", "phase", "since"
     "loads": [id], "stores": [id],    worker: begun, and their end is not reported
     "answered": [id],           worker: those of both whose end is known here, and is reported in the next step
     "unreported": [id],         worker: ended, and waits for a report for another reason
     "failed_blocks": 0,         worker: of loads that failed, not reported
     "pins": {id: 3},            worker, in process: chunks that a lookup has pinned
     "fetched": [id],            worker, in process: chunks that an asynchronous lookup has brought
     "threads": {"lookup_server": True}}   worker, in process: whether the thread that answers lookups runs
"""

from __future__ import annotations

import sys
import time

from .places import where

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any


def read(connectors: Sequence[Any]) -> list[dict[str, Any]]:
    """All of them, without duplicates: a process may hold both roles."""
    return [_one(each) for each in _with_children(connectors)]


def _with_children(connectors: Iterable[Any]) -> Iterable[Any]:
    for each in connectors:
        children = getattr(each, "_connectors", None)
        if isinstance(children, list | tuple) and children:
            yield from _with_children(children)
        else:
            yield each


def by_request(connectors: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{request: what the scheduler's connectors hold of it}; of several the one that promises most."""
    found: dict[str, dict[str, Any]] = {}
    for connector in connectors:
        for name, row in (connector.get("requests") or {}).items():
            if name not in found or (row.get("promised") or 0) > (found[name].get("promised") or 0):
                found[name] = row
    return found


def _one(connector: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(connector).__name__, "role": _role(connector), **_place(connector)}
    try:
        if hasattr(connector, "_lmcache_engine"):
            _v1(state, connector._lmcache_engine)
        elif hasattr(connector, "scheduler_adapter"):
            _mp_scheduler(state, connector)
        elif hasattr(connector, "worker_adapter"):
            _mp_worker(state, connector.worker_adapter)
    except Exception as error:  # noqa: BLE001  a release that is not known
        state["unread"] = where(error)
    return state


def _role(connector: Any) -> str:
    return str(getattr(getattr(connector, "role", None), "name", ""))


def _place(connector: Any) -> dict[str, Any]:
    """`engine_id` is the same in all processes of an engine (vllm/config/kv_transfer.py 0.32.0)."""
    try:
        config = connector._vllm_config
        parallel = config.parallel_config
        engine = str(config.kv_transfer_config.engine_id)
        return {"engine": engine, "rank": int(parallel.rank), "ranks": int(parallel.world_size)}
    except Exception:  # noqa: BLE001  optional fields
        return {"engine": None, "rank": None, "ranks": None}


# ---------------------------------------------------------------------- LMCache in vLLM's own processes


def _v1(state: dict[str, Any], impl: Any) -> None:
    """LMCacheConnectorV1Impl (lmcache/integration/vllm/vllm_v1_adapter.py)."""
    manager = getattr(impl, "_manager", None)
    config = getattr(impl, "config", None)
    client = _unwrapped(getattr(impl, "lookup_client", None))
    engine = getattr(impl, "lmcache_engine", None)
    state["chunk_size"] = getattr(impl, "_lmcache_chunk_size", None)
    state["lookup_timeout"] = (getattr(config, "lookup_timeout_ms", None) or 3000) / 1000
    state["asynchronous"] = bool(getattr(impl, "async_loading", False))
    failed = bool(getattr(manager, "_init_failed", False))
    reason = str(getattr(manager, "_init_failed_reason", "")).strip().rpartition("\n")[2]
    state["why"] = reason.partition(":")[0][:80] if failed else ""
    if state["role"] == "SCHEDULER" or (not state["role"] and client is not None):
        state["healthy"] = None if client is None and not failed else not failed
        state["requests"] = _v1_requests(impl, client)
        return
    state["healthy"] = engine is not None and not failed
    state["loads"], state["stores"] = [], []  # both are done within the step
    state["failed_blocks"] = len(getattr(impl, "_invalid_block_ids", ()))
    state["pins"] = {name: _count(pins) for name, pins in dict(getattr(engine, "lookup_pins", None) or {}).items()}
    events = dict(getattr(getattr(engine, "event_manager", None), "events", None) or {})
    by_status = [names for kinds in events.values() for names in dict(kinds).values()]
    state["fetched"] = [name for names in by_status for name in list(names)]
    server = getattr(impl, "lookup_server", None) or getattr(manager, "_lookup_server", None)
    thread = getattr(server, "thread", None)
    state["threads"] = {} if thread is None else {"lookup_server": thread.ident in sys._current_frames()}


def _unwrapped(client: Any) -> Any:
    """The client that asks: two others only count or limit (hit_limit_lookup_client.py 0.5.6:31)."""
    for _ in range(4):
        inner = getattr(client, "actual_lookup_client", None)
        if inner is None:
            break
        client = inner
    return client


def _v1_requests(impl: Any, client: Any) -> dict[str, dict[str, Any]]:
    specs, trackers = dict(getattr(impl, "load_specs", {})), dict(getattr(impl, "_request_trackers", {}))
    statuses = dict(getattr(client, "reqs_status", {}))
    began, now = dict(getattr(client, "first_lookup_time", {})), time.time()
    aborted = getattr(client, "aborted_lookups", ())
    found = {}
    for name in {**statuses, **trackers, **specs}:
        row: dict[str, Any] = {"hit": None, "promised": None, "granted": None, "stored": None, "since": None}
        row["phase"] = ""
        row["lookup"] = "in flight" if name in statuses and statuses[name] is None else ""
        if name in aborted:
            row["lookup"] = "given up"
        if row["lookup"] and name in began:
            row["since"] = round(now - began[name], 3)
        if name in statuses:
            row["hit"] = statuses[name]
        if name in specs:
            spec = specs[name]
            row["hit"] = spec.lmcache_cached_tokens
            row["promised"] = max(0, spec.lmcache_cached_tokens - spec.vllm_cached_tokens)
            row["granted"] = row["promised"] if spec.can_load else None
        if name in trackers:
            row["stored"] = getattr(trackers[name], "num_saved_tokens", None)
        found[name] = row
    return found


def _count(pins: Any) -> int:
    """Keys of {location: [keys]}."""
    return sum(len(keys) for keys in list(pins.values())) if isinstance(pins, dict) else len(pins)


# ---------------------------------------------------------------------- LMCache's server and its connectors


def _mp_scheduler(state: dict[str, Any], connector: Any) -> None:
    """LMCacheMPConnector, LMCache's own and vLLM's copy of it (lmcache_mp_connector.py)."""
    adapter = connector.scheduler_adapter
    size = getattr(connector, "vllm_block_size", 1)
    state["chunk_size"] = getattr(adapter, "lmcache_tokens_per_chunk", getattr(adapter, "chunk_size", None))
    state["lookup_timeout"] = getattr(adapter, "_mq_timeout", None)
    state["healthy"] = _healthy(adapter)
    state["server_ports"] = _server_ports(connector)
    pending = set(getattr(adapter, "_pending_lookups", ()))
    done = dict(getattr(adapter, "_finished_lookup_results", {}))
    unacknowledged = dict(getattr(adapter, "_unacked_lookups", {}))
    asked, now = dict(getattr(adapter, "_lookup_status", {})), time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    trackers = dict(getattr(connector, "request_trackers", {}))
    for name in {**dict.fromkeys(pending), **dict.fromkeys(done), **trackers}:
        row: dict[str, Any] = {"lookup": "", "hit": done.get(name), "promised": None, "granted": None, "since": None}
        times = [at for _, at in list(asked.get(name, {}).values())]
        if name in unacknowledged:
            times.append(unacknowledged[name].submitted_at)
        if name in pending and name not in done:
            row["lookup"] = "in flight"
        tracker = trackers.get(name)
        if tracker is not None:
            _tracked(row, tracker, size)
            if row["lookup"] and getattr(tracker, "lookup_started_at", None):
                times.append(tracker.lookup_started_at)
        if row["lookup"] and times:
            row["since"] = round(now - min(times), 3)
        found[name] = row
    state["requests"] = found


def _server_ports(connector: Any) -> list[int]:
    """Without the hosts (lmcache_mp_connector.py 0.5.6:600-650)."""
    settings = connector._vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    urls = settings.get("lmcache.mp.server_urls") or [f":{settings.get('lmcache.mp.port', 5555)}"]
    urls = urls.split(",") if isinstance(urls, str) else urls
    return [int(port) for url in urls if (port := str(url).strip().rpartition(":")[2]).isdecimal()]


def _tracked(row: dict[str, Any], tracker: Any, size: int) -> None:
    """Of LMCacheMPRequestTracker, which counts blocks up to 0.4.6 and in vLLM's copy, and tokens later."""

    def tokens(name: str) -> int:
        in_blocks = getattr(tracker, f"num_{name}_blocks", None)
        return int(in_blocks * size if in_blocks is not None else getattr(tracker, f"num_{name}_tokens", 0))

    row["phase"] = phase = str(getattr(getattr(tracker, "state", None), "name", ""))
    hit, have = tokens("lmcache_hit"), tokens("vllm_hit")
    row["stored"] = tokens("stored")
    if phase == "PREFETCHING" and row["lookup"]:
        return
    row["hit"] = max(hit, row["hit"] or 0)
    row["promised"] = max(0, hit - have)
    row["granted"] = row["promised"] if phase in ("WAITING_FOR_LOAD", "READY") else None


def _mp_worker(state: dict[str, Any], adapter: Any) -> None:
    """LMCacheMPWorkerAdapter (vllm_multi_process_adapter.py). A transfer has no time of its own there."""
    state["lookup_timeout"] = getattr(adapter, "_mq_timeout", None)
    state["healthy"] = _healthy(adapter)
    loads, stores = dict(adapter.retrieve_futures), dict(adapter.store_futures)
    state["loads"], state["stores"] = list(loads), list(stores)
    state["answered"] = [name for name, future in [*loads.items(), *stores.items()] if _is_done(future)]
    state["unreported"] = sorted(set(getattr(adapter, "_dropped_retrieves", ())) | set(adapter.previously_finished))
    state["failed_blocks"] = len(getattr(adapter, "error_block_ids", ()))


def _is_done(future: Any) -> bool:
    """Of a future, or of a future with its blocks. It is not asked itself: that may ask the device."""
    future = future[0] if isinstance(future, tuple) else future
    for each in (future, getattr(future, "raw_future_", None)):
        event = getattr(each, "is_done_", None)
        if event is not None:
            return bool(event.is_set())
    return False


def _healthy(adapter: Any) -> bool | None:
    """Its flags are set while every server answers the pings."""
    events = list(getattr(adapter, "_health_events", {}).values()) or [getattr(adapter, "_health_event", None)]
    return None if None in events else all(event.is_set() for event in events)
