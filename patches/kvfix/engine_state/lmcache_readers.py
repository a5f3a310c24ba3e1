"""Readers for LMCache's connectors. The readers know the attributes of LMCache 0.3.9 to 0.5.6."""

import sys
import time
from collections.abc import Collection, Iterable
from typing import Any

from .reader import PINS, Reader, Spans


def reader(connector: Any) -> Reader | None:
    """Return the reader for a connector of LMCache, or None for any other connector."""
    if hasattr(connector, "_lmcache_engine"):
        return V1(connector)
    if hasattr(connector, "scheduler_adapter") or hasattr(connector, "worker_adapter"):
        return MP(connector)
    return None


class V1(Reader):
    """The reader for LMCache in vLLM's own processes (lmcache/integration/vllm/vllm_v1_adapter.py)."""

    _LOOKUPS = ("reqs_status", "aborted_lookups")
    _SETTINGS = (
        "save_decode_cache", "save_unfull_chunk", "min_retrieve_tokens", "max_tokens_per_load", "enable_async_loading",
    )  # fmt: skip
    _KEPT = ("load_specs", "_request_trackers", "_unfinished_requests", "_requests_priority")

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.impl = connector._lmcache_engine
        self.client = getattr(self.impl, "lookup_client", None)
        self._statuses = getattr(self.client, "reqs_status", {})
        #: LMCache's global dictionary {request id: decode instance}. All connectors of a process share this dictionary.
        self._decoders = getattr(sys.modules[type(self.impl).__module__], "tmp_disagg_tracker", {})
        config = getattr(self.impl, "config", None)
        self._timeout = (getattr(config, "lookup_timeout_ms", None) or 3000) / 1000
        self._chunk = getattr(self.impl, "_lmcache_chunk_size", 1)

    def hit(self, request: str) -> int | None:
        status = self._statuses.get(request)
        return status if isinstance(status, int) else None

    def lookup_timeout(self) -> float:
        return 0.0 if getattr(self.impl, "async_loading", False) else float(self._timeout)

    def settings(self) -> dict[str, Any]:
        config = getattr(self.impl, "config", None)
        found = {name: getattr(config, name, None) for name in self._SETTINGS}
        return {"chunk_size": self._chunk, **{name: value for name, value in found.items() if value is not None}}

    def loads(self, metadata: Any) -> Spans:
        specs = [(meta.req_id, meta.load_spec, len(meta.token_ids)) for meta in metadata.requests]
        return [  # the worker loads at most the tokens in `token_ids` (0.5.6 vllm_v1_adapter.py:856)
            (name, spec.vllm_cached_tokens, min(spec.lmcache_cached_tokens, most))
            for name, spec, most in specs
            if spec is not None and spec.can_load
        ]

    def stores(self, metadata: Any) -> Spans:
        if self.impl.kv_role == "kv_consumer":
            return []
        specs = [(meta.req_id, meta.save_spec, len(meta.token_ids)) for meta in metadata.requests]
        return [
            (name, spec.skip_leading_tokens // self._chunk * self._chunk, end)
            for name, spec, end in specs
            if spec is not None and spec.can_save and spec.skip_leading_tokens < end
        ]

    def not_stored(self, metadata: Any) -> Collection[str]:
        specs = [(meta.req_id, meta.save_spec) for meta in metadata.requests]
        return {name for name, spec in specs if spec is not None and not spec.can_save}

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        yield from self.containers(self.impl, self._KEPT)
        yield from self.containers(self.client, self._LOOKUPS, "lookup_client.")
        if self.client is not None:
            yield "tmp_disagg_tracker", self._decoders
        pins = self._pins()
        if pins is not None:
            yield PINS, pins

    def pinned(self, request: str) -> Any:
        return (self._pins() or {}).get(request)

    def looks_up(self, request: str) -> bool:
        return any(request in getattr(self.client, name, ()) for name in self._LOOKUPS)

    def _pins(self) -> Any:
        """Return the worker's {request id: pinned chunks}, or None in the scheduler or if LMCache keeps no pins."""
        engine = None if self.client is not None else getattr(self.impl, "lmcache_engine", None)
        return getattr(engine, "lookup_pins", None)

    def left(self, request: str) -> list[str]:
        """Ignore a cancelled lookup. LMCache removes the lookup later (lmcache_async_lookup_client.py 0.5.6:260)."""
        if request in self._statuses and request in getattr(self.client, "aborted_lookups", ()):
            return [where for where in super().left(request) if not where.startswith("lookup_client.")]
        return super().left(request)

    def add_state(self, state: dict[str, Any]) -> None:
        impl = self.impl
        manager = getattr(impl, "_manager", None)
        client = self.client
        for _ in range(4):  # skip clients that only count or limit lookups (hit_limit_lookup_client.py 0.5.6:31)
            client = getattr(client, "actual_lookup_client", None) or client
        engine = getattr(impl, "lmcache_engine", None)
        state["chunk_size"] = getattr(impl, "_lmcache_chunk_size", None)
        state["lookup_timeout"] = self._timeout
        state["asynchronous"] = bool(getattr(impl, "async_loading", False))
        failed = bool(getattr(manager, "_init_failed", False))
        reason = str(getattr(manager, "_init_failed_reason", "")).strip().rpartition("\n")[2]
        state["why"] = reason.partition(":")[0][:80] if failed else ""
        if state["role"] == "SCHEDULER" or (not state["role"] and client is not None):
            state["healthy"] = None if client is None and not failed else not failed
            state["requests"] = _v1_requests(impl, client)
            return
        state["healthy"] = engine is not None and not failed
        state["loads"], state["stores"] = [], []  # always empty: LMCache loads and stores within the step
        state["failed_blocks"] = len(getattr(impl, "_invalid_block_ids", ()))
        state["pins"] = {name: _count(pins) for name, pins in dict(getattr(engine, "lookup_pins", None) or {}).items()}
        events = dict(getattr(getattr(engine, "event_manager", None), "events", None) or {})
        by_status = [names for kinds in events.values() for names in dict(kinds).values()]
        state["fetched"] = [name for names in by_status for name in list(names)]
        server = getattr(impl, "lookup_server", None) or getattr(manager, "_lookup_server", None)
        thread = getattr(server, "thread", None)
        state["threads"] = {} if thread is None else {"lookup_server": thread.is_alive()}


def _row(hit: int | None, lookup: str) -> dict[str, Any]:
    """Return a row with `hit` and `lookup`, and with other fields empty (see `kvfix.engine_state.scheduler`)."""
    return {"hit": hit, "lookup": lookup, "phase": "", **dict.fromkeys(("promised", "granted", "stored", "since"))}


def _v1_requests(impl: Any, client: Any) -> dict[str, dict[str, Any]]:
    specs, trackers = dict(getattr(impl, "load_specs", {})), dict(getattr(impl, "_request_trackers", {}))
    statuses = dict(getattr(client, "reqs_status", {}))
    began, now = dict(getattr(client, "first_lookup_time", {})), time.time()
    aborted = getattr(client, "aborted_lookups", ())
    found = {}
    for name in {**statuses, **trackers, **specs}:
        lookup = "in flight" if name in statuses and statuses[name] is None else ""
        found[name] = row = _row(statuses.get(name), "given up" if name in aborted else lookup)
        if row["lookup"] and name in began:
            row["since"] = round(now - began[name], 3)
        if name in specs:
            spec = specs[name]
            row["hit"] = spec.lmcache_cached_tokens
            row["promised"] = max(0, spec.lmcache_cached_tokens - spec.vllm_cached_tokens)
            row["granted"] = row["promised"] if spec.can_load else None
        row["stored"] = getattr(trackers.get(name), "num_saved_tokens", None)
    return found


def _count(pins: Any) -> int:
    """Count the pinned keys of one request. pins: the keys, or {storage location: keys}."""
    return sum(len(keys) for keys in list(pins.values())) if isinstance(pins, dict) else len(pins)


class MP(Reader):
    """The reader for LMCache's multi-process connector and vLLM's copy of this connector (lmcache_mp_connector.py)."""

    reports_sent = True
    _LOOKUPS = ("_finished_lookup_results", "_per_server_hits", "_lookup_status", "_lookup_params")
    _TRANSFERS = ("store_futures", "retrieve_futures", "finished_stores", "previously_finished")

    def hit(self, request: str) -> int | None:
        """Return None while the server does not answer pings, because the connector then promises 0 tokens."""
        adapter = self.connector.scheduler_adapter
        found = adapter._finished_lookup_results.get(request) if getattr(adapter, "is_healthy", True) else None
        return found if isinstance(found, int) else None

    def found(self, request: str) -> int:
        tracker = getattr(self.connector, "request_trackers", {}).get(request)
        return int(getattr(tracker, "num_lmcache_hit_tokens", 0) or 0)

    def settings(self) -> dict[str, Any]:
        chunk = self._chunk()
        return {"chunk_size": chunk} if isinstance(chunk, int) else {}

    def _chunk(self) -> Any:
        adapter = getattr(self.connector, "scheduler_adapter", None)
        return getattr(adapter, "lmcache_tokens_per_chunk", getattr(adapter, "chunk_size", None))

    def loads(self, metadata: Any) -> Spans:
        ops = [(meta.request_id, meta.op) for meta in metadata.requests if meta.direction == "RETRIEVE"]
        return [(name, op.start + getattr(op, "skip_first_n_tokens", 0), op.end) for name, op in ops]

    def stores(self, metadata: Any) -> Spans:
        metas = [meta for meta in metadata.requests if meta.direction == "STORE"]
        return [(meta.request_id, meta.op.start, meta.op.end) for meta in metas]

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        scheduler, worker = (getattr(self.connector, f"{role}_adapter", None) for role in ("scheduler", "worker"))
        if scheduler is not None:
            yield "request_trackers", self.connector.request_trackers
        yield from self.containers(scheduler, self._LOOKUPS, "scheduler_adapter.")
        yield from self.containers(worker, self._TRANSFERS, "worker_adapter.")

    def left(self, request: str) -> list[str]:
        """Ignore the lookup of an ended request if the fix KVF105 keeps the lookup until the server answers."""
        found = super().left(request)
        if request in getattr(self.connector, "_kvfix_looking", ()):
            return [where for where in found if not where.startswith("scheduler_adapter.")]
        return found

    def add_state(self, state: dict[str, Any]) -> None:
        if hasattr(self.connector, "scheduler_adapter"):
            self._add_scheduler(state)
        else:
            _add_worker(state, self.connector.worker_adapter)

    def _add_scheduler(self, state: dict[str, Any]) -> None:
        connector, adapter = self.connector, self.connector.scheduler_adapter
        size = getattr(connector, "vllm_block_size", 1)
        state["chunk_size"] = self._chunk()
        state["lookup_timeout"] = getattr(adapter, "_mq_timeout", None)
        state["healthy"] = _healthy(adapter)
        state["server_ports"] = _server_ports(connector)
        pending = set(getattr(adapter, "_pending_lookups", ()))
        done = dict(getattr(adapter, "_finished_lookup_results", {}))
        unacknowledged = dict(getattr(adapter, "_unacked_lookups", {}))
        asked, now = dict(getattr(adapter, "_lookup_status", {})), time.monotonic()
        state["requests"] = found = dict[str, "dict[str, Any]"]()
        trackers = dict(getattr(connector, "request_trackers", {}))
        for name in {**dict.fromkeys(pending), **dict.fromkeys(done), **trackers}:
            is_pending = name in pending and name not in done
            found[name] = row = _row(done.get(name), "in flight" if is_pending else "")
            times = [at for _, at in list(asked.get(name, {}).values())]
            if name in unacknowledged:
                times.append(unacknowledged[name].submitted_at)
            tracker = trackers.get(name)
            if tracker is not None:
                _tracked(row, tracker, size)
                if getattr(tracker, "lookup_started_at", None):
                    times.append(tracker.lookup_started_at)
            if is_pending and times:
                row["since"] = round(now - min(times), 3)


def _server_ports(connector: Any) -> list[int]:
    """Return the ports of the server URLs, without the hosts (lmcache_mp_connector.py 0.5.6:600-650)."""
    settings = connector._vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    urls = settings.get("lmcache.mp.server_urls") or [f":{settings.get('lmcache.mp.port', 5555)}"]
    urls = urls.split(",") if isinstance(urls, str) else urls
    return [int(port) for url in urls if (port := str(url).strip().rpartition(":")[2]).isdecimal()]


def _tracked(row: dict[str, Any], tracker: Any, size: int) -> None:
    """Add the tracker's counts to `row`, in tokens. Trackers of LMCache up to 0.4.6 and of vLLM's copy count blocks."""

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


def _add_worker(state: dict[str, Any], adapter: Any) -> None:
    """Add the state of a worker adapter (vllm_multi_process_adapter.py). The adapter does not record times."""
    state["lookup_timeout"] = getattr(adapter, "_mq_timeout", None)
    state["healthy"] = _healthy(adapter)
    loads, stores = dict(adapter.retrieve_futures), dict(adapter.store_futures)
    state["loads"], state["stores"] = list(loads), list(stores)
    state["answered"] = [name for name, future in [*loads.items(), *stores.items()] if _is_done(future)]
    state["unreported"] = sorted(set(getattr(adapter, "_dropped_retrieves", ())) | set(adapter.previously_finished))
    state["failed_blocks"] = len(getattr(adapter, "error_block_ids", ()))


def _is_done(future: Any) -> bool:
    """Return True if a future or pair (future, blocks) is done. Do not call `query()`, which could wait for the GPU."""
    future = future[0] if isinstance(future, tuple) else future
    for each in (future, getattr(future, "raw_future_", None)):
        event = getattr(each, "is_done_", None)
        if event is not None:
            return bool(event.is_set())
    return False


def _healthy(adapter: Any) -> bool | None:
    """Return True if every server answers pings, or None if this release of LMCache does not ping."""
    events = list(getattr(adapter, "_health_events", {}).values()) or [getattr(adapter, "_health_event", None)]
    return None if None in events else all(event.is_set() for event in events)
