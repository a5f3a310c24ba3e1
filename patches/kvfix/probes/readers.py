"""What only the connector's own state and metadata can tell, for the connectors that are known.

A reader is asked after the hook has answered, reads and changes nothing, and may fail: then its connector is recorded
and not judged any more. None: this connector does not tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Optional

#: (request, first token, end)
Span = tuple[str, int, int]
Spans = Optional["list[Span]"]
#: Where the chunks are that a lookup has pinned for its load.
PINS = "pins of the worker"


class Reader:
    """Any connector: vLLM's hooks tell promises and grants; loads and stores are not known."""

    #: Whether the worker reports every ended request as sent, when its transfers are done.
    reports_sent = False

    def __init__(self, connector: Any) -> None:
        self.connector = connector

    def hit(self, request: str) -> int | None:
        """Tokens that the last lookup of this request found in the external cache."""
        return None

    def lookup_timeout(self) -> float:
        """Seconds that the hook waits for a lookup at most; 0: it never waits."""
        return 0.0

    def loads(self, metadata: Any) -> Spans:
        """What the metadata tell the worker to load."""
        return None

    def stores(self, metadata: Any) -> Spans:
        """What the metadata tell the worker to store."""
        return None

    def settings(self) -> dict[str, Any]:
        """Of the connector: what changes the accounting, `chunk_size` first of all. Empty if it does not tell."""
        return {}

    def kept_back(self, metadata: Any) -> Collection[str]:
        """Requests of these metadata that the worker was kept from storing after all (KVF007)."""
        return ()

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """(where, what is kept there by request id): all that must be gone when the request has ended."""
        return ()

    def pinned(self, request: str) -> Any:
        """What is pinned for this request: another object for another request of the same id. None: nothing."""
        return None

    def looks_up(self, request: str) -> bool:
        """Whether the lookup client keeps something of this request."""
        return False

    def left(self, request: str) -> list[str]:
        """Where this request, which has ended, is kept for good."""
        return [where for where, names in self.kept() if request in names]


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
        told = {name: getattr(config, name, None) for name in self._SETTINGS}
        return {"chunk_size": self._chunk, **{name: value for name, value in told.items() if value is not None}}

    def loads(self, metadata: Any) -> Spans:
        return [  # of the tokens that it is given, the worker loads so many (0.5.6 vllm_v1_adapter.py:856)
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

    def kept_back(self, metadata: Any) -> Collection[str]:
        specs = [(meta.req_id, meta.save_spec) for meta in metadata.requests]
        return {name for name, spec in specs if spec is not None and not spec.can_save}

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        for name in self._KEPT:
            if hasattr(self.impl, name):
                yield name, getattr(self.impl, name)
        for name in self._LOOKUPS:
            if hasattr(self.client, name):
                yield f"lookup_client.{name}", getattr(self.client, name)
        pins = self._pins()
        if pins is not None:
            yield PINS, pins

    def pinned(self, request: str) -> Any:
        return (self._pins() or {}).get(request)

    def looks_up(self, request: str) -> bool:
        return any(request in getattr(self.client, name, ()) for name in self._LOOKUPS)

    def _pins(self) -> Any:
        """The worker's, by request; None in the scheduler, and where there are none."""
        engine = None if self.client is not None else getattr(self.impl, "lmcache_engine", None)
        return getattr(engine, "lookup_pins", None)

    def left(self, request: str) -> list[str]:
        """An aborted lookup that is or will be answered is cleaned up by the next lookup of any other request
        (lmcache_async_lookup_client.py 0.5.6:260)."""
        if request in self._statuses and request in getattr(self.client, "aborted_lookups", ()):
            return [where for where in super().left(request) if not where.startswith("lookup_client.")]
        return super().left(request)


class MP(Reader):
    """LMCache's multi-process connector, and vLLM's copy of it (lmcache_mp_connector.py)."""

    reports_sent = True
    _LOOKUPS = ("_finished_lookup_results", "_per_server_hits", "_lookup_status", "_lookup_params")
    _TRANSFERS = ("store_futures", "retrieve_futures", "finished_stores", "previously_finished")

    def hit(self, request: str) -> int | None:
        found = self.connector.scheduler_adapter._finished_lookup_results.get(request)
        return found if isinstance(found, int) else None

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


def reader(connector: Any) -> Reader:
    """By what the connector has, not by its name: forks and copies have the same."""
    if hasattr(connector, "_lmcache_engine"):
        return V1(connector)
    if hasattr(connector, "scheduler_adapter") or hasattr(connector, "worker_adapter"):
        return MP(connector)
    return Reader(connector)


def place(connector: Any) -> dict[str, Any]:
    """Which engine it is of, which of its data-parallel replicas, and which rank of how many. Empty if it does not say.

    An engine is known by its `engine_id` to the connectors of all its processes and nodes, for they tell one another
    (vllm/config/kv_transfer.py 0.32.0). A scheduler is rank 0.
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
    except Exception:  # noqa: BLE001  it is a supplement
        return {}


def model(connector: Any) -> tuple[int, bool]:
    """`replay` and `divergent` of `kvfix.ledger.events.Asked`; those of most models if it does not say."""
    try:
        groups = getattr(getattr(connector, "_kv_cache_config", None), "kv_cache_groups", None) or ()
        replays = [int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)) for group in groups]
        return max(replays, default=0), bool(getattr(connector, "supports_divergent_local_hybrid_hits", False))
    except Exception:  # noqa: BLE001  it is a supplement
        return 0, False


def sizes(connector: Any, reader: Reader) -> dict[str, Any]:
    """What the engine was made with, so that what is on record can be played again. Empty if it does not say."""
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
    except Exception:  # noqa: BLE001  it is a supplement
        return {}
