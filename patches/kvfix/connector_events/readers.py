"""Readers of a connector's own state and metadata, for the known connectors.

A reader runs after the hook. It only reads. If it raises, its connector is still recorded, but no rule is checked any
more. None: this connector does not have the value.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from kvfix.connector_events.offload_readers import Offloading as Offloading
from kvfix.connector_events.offload_readers import SimpleOffload as SimpleOffload
from kvfix.connector_events.offload_readers import span as span
from kvfix.connector_events.reader import PINS as PINS
from kvfix.connector_events.reader import Reader as Reader
from kvfix.connector_events.reader import Span as Span
from kvfix.connector_events.reader import Spans as Spans


class V1(Reader):
    """LMCache in vLLM's own processes (lmcache/integration/vllm/vllm_v1_adapter.py)."""

    _LOOKUPS = ("reqs_status", "aborted_lookups")
    _SETTINGS = (
        "save_decode_cache",
        "save_unfull_chunk",
        "min_retrieve_tokens",
        "max_tokens_per_load",
        "enable_async_loading",
    )
    _KEPT = ("load_specs", "_request_trackers", "_unfinished_requests", "_requests_priority")

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.impl = connector._lmcache_engine
        self.client = getattr(self.impl, "lookup_client", None)
        self._statuses = getattr(self.client, "reqs_status", {})
        #: Of the module, and so of both roles where they share a process.
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
        return [  # the worker loads no more tokens than it gets (0.5.6 vllm_v1_adapter.py:856)
            (
                meta.req_id,
                meta.load_spec.vllm_cached_tokens,
                min(meta.load_spec.lmcache_cached_tokens, len(meta.token_ids)),
            )
            for meta in metadata.requests
            if meta.load_spec is not None and meta.load_spec.can_load
        ]

    def stores(self, metadata: Any) -> Spans:
        if self.impl.kv_role == "kv_consumer":
            return []
        return [
            (meta.req_id, meta.save_spec.skip_leading_tokens // self._chunk * self._chunk, len(meta.token_ids))
            for meta in metadata.requests
            if meta.save_spec is not None
            and meta.save_spec.can_save
            and meta.save_spec.skip_leading_tokens < len(meta.token_ids)
        ]

    def not_stored(self, metadata: Any) -> Collection[str]:
        specs = [(meta.req_id, meta.save_spec) for meta in metadata.requests]
        return {name for name, spec in specs if spec is not None and not spec.can_save}

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        for name in self._KEPT:
            if hasattr(self.impl, name):
                yield name, getattr(self.impl, name)
        for name in self._LOOKUPS:
            if hasattr(self.client, name):
                yield f"lookup_client.{name}", getattr(self.client, name)
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
        """The worker's pins by request; None in the scheduler, and in a worker that has none."""
        engine = None if self.client is not None else getattr(self.impl, "lmcache_engine", None)
        return getattr(engine, "lookup_pins", None)

    def left(self, request: str) -> list[str]:
        """The next lookup of any request cleans up an aborted lookup that is answered
        (lmcache_async_lookup_client.py 0.5.6:260): it has not leaked."""
        if request in self._statuses and request in getattr(self.client, "aborted_lookups", ()):
            return [where for where in super().left(request) if not where.startswith("lookup_client.")]
        return super().left(request)


class MP(Reader):
    """LMCache's multi-process connector, and vLLM's copy of it (lmcache_mp_connector.py)."""

    reports_sent = True
    _LOOKUPS = ("_finished_lookup_results", "_per_server_hits", "_lookup_status", "_lookup_params")
    _TRANSFERS = ("store_futures", "retrieve_futures", "finished_stores", "previously_finished")

    def hit(self, request: str) -> int | None:
        """None as well while the connector takes the server for dead: it then promises nothing, whatever was found."""
        adapter = self.connector.scheduler_adapter
        found = adapter._finished_lookup_results.get(request) if getattr(adapter, "is_healthy", True) else None
        return found if isinstance(found, int) else None

    def found(self, request: str) -> int:
        tracker = getattr(self.connector, "request_trackers", {}).get(request)
        return int(getattr(tracker, "num_lmcache_hit_tokens", 0) or 0)

    def settings(self) -> dict[str, Any]:
        adapter = getattr(self.connector, "scheduler_adapter", None)
        chunk = getattr(adapter, "lmcache_tokens_per_chunk", getattr(adapter, "chunk_size", None))
        return {"chunk_size": chunk} if isinstance(chunk, int) else {}

    def loads(self, metadata: Any) -> Spans:
        return [
            (meta.request_id, meta.op.start + getattr(meta.op, "skip_first_n_tokens", 0), meta.op.end)
            for meta in metadata.requests
            if meta.direction == "RETRIEVE"
        ]

    def stores(self, metadata: Any) -> Spans:
        return [
            (meta.request_id, meta.op.start, meta.op.end) for meta in metadata.requests if meta.direction == "STORE"
        ]

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        adapter = getattr(self.connector, "scheduler_adapter", None)
        if adapter is not None:
            yield "request_trackers", self.connector.request_trackers
            for name in self._LOOKUPS:
                yield f"scheduler_adapter.{name}", getattr(adapter, name, ())
        adapter = getattr(self.connector, "worker_adapter", None)
        if adapter is not None:
            for name in self._TRANSFERS:
                yield f"worker_adapter.{name}", getattr(adapter, name, ())

    def left(self, request: str) -> list[str]:
        """KVF105 keeps the lookup of a request that has ended until the server, silent meanwhile, answers."""
        found = super().left(request)
        if request in getattr(self.connector, "_kvfix_looking", ()):
            return [where for where in found if not where.startswith("scheduler_adapter.")]
        return found


def reader(connector: Any) -> Reader:
    """The reader for this connector, by its attributes, not by its name: forks and copies have the same attributes."""
    if hasattr(connector, "_lmcache_engine"):
        return V1(connector)
    if hasattr(connector, "scheduler_adapter") or hasattr(connector, "worker_adapter"):
        return MP(connector)
    if hasattr(getattr(connector, "connector_scheduler", None), "_generate_job_id"):
        return Offloading(connector)
    if hasattr(getattr(connector, "connector_worker", None), "_unsubmitted_store_jobs"):
        return Offloading(connector)
    if hasattr(connector, "scheduler_manager") and hasattr(connector, "worker_handler"):
        return SimpleOffload(connector)
    side = getattr(connector, "connector_scheduler", None) or getattr(connector, "connector_worker", None)
    if hasattr(side, "_nixl_handshake_listener_t") or hasattr(side, "nixl_wrapper"):
        from kvfix.connector_events import nixl_readers

        return nixl_readers.reader(connector, getattr(side, "_TRANSFER_MODE", ""))
    if hasattr(side, "_reqs_not_processed") or hasattr(side, "reqs_need_send"):
        from kvfix.connector_events.mooncake import Mooncake

        return Mooncake(connector)
    return Reader(connector)


def place(connector: Any) -> dict[str, Any]:
    """The connector's engine, data-parallel replica, rank and number of ranks. Empty if it does not have them.

    `engine_id` is the same in all processes and nodes of an engine (vllm/config/kv_transfer.py 0.32.0). A scheduler is
    rank 0.
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


def model(connector: Any) -> tuple[int, bool]:
    """`replay` and `divergent` of `kvfix.ledger.events.Asked`; the values of most models if they cannot be read."""
    try:
        groups = getattr(getattr(connector, "_kv_cache_config", None), "kv_cache_groups", None) or ()
        replays = [int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)) for group in groups]
        return max(replays, default=0), bool(getattr(connector, "supports_divergent_local_hybrid_hits", False))
    except Exception:  # noqa: BLE001  optional fields
        return 0, False


def sizes(connector: Any, reader: Reader) -> dict[str, Any]:
    """Sizes of the engine, so that the lab can replay the record. Empty if they cannot be read."""
    try:
        config, settings = connector._vllm_config, reader.settings()
        cache, scheduler = config.cache_config, config.scheduler_config
        return {
            "block_size": int(cache.block_size),
            "num_blocks": int(cache.num_gpu_blocks),
            "prefix_caching": bool(cache.enable_prefix_caching),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_model_len": int(config.model_config.max_model_len),
            "chunk_size": int(settings.pop("chunk_size")),
            "lmcache": settings,
        }
    except Exception:  # noqa: BLE001  optional fields
        return {}
