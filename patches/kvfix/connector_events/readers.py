"""Choose the reader for a connector's state and metadata. `kvfix.engine_state.reader` explains readers.

This module also has the readers of vLLM's connectors for CPU memory: OffloadingConnector and SimpleCPUOffloadConnector.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvfix.connector_events import peers
from kvfix.engine_state import lmcache_readers
from kvfix.engine_state.reader import Reader, Spans


def reader(connector: Any) -> Reader:
    """Choose the reader by the connector's attributes, because a fork of a connector usually keeps the attributes."""
    found = lmcache_readers.reader(connector)
    if found is not None:
        return found
    scheduler, worker = (getattr(connector, f"connector_{role}", None) for role in ("scheduler", "worker"))
    if hasattr(scheduler, "_generate_job_id") or hasattr(worker, "_unsubmitted_store_jobs"):
        return Offloading(connector)
    if hasattr(connector, "scheduler_manager") and hasattr(connector, "worker_handler"):
        return SimpleOffload(connector)
    side = scheduler or worker
    if hasattr(side, "_nixl_handshake_listener_t") or hasattr(side, "nixl_wrapper"):
        of_mode = {"pull": peers.Nixl, "push": peers.NixlPush}
        return of_mode.get(getattr(side, "_TRANSFER_MODE", ""), Reader)(connector)
    if hasattr(side, "_reqs_not_processed") or hasattr(side, "reqs_need_send"):
        return peers.Mooncake(connector)
    return Reader(connector)


def model(connector: Any) -> tuple[int, bool]:
    """Return the fields `replay` and `divergent` of events.Asked, or (0, False) if the connector lacks the values."""
    try:
        groups = getattr(getattr(connector, "_kv_cache_config", None), "kv_cache_groups", None) or ()
        replays = [int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)) for group in groups]
        return max(replays, default=0), bool(getattr(connector, "supports_divergent_local_hybrid_hits", False))
    except Exception:  # noqa: BLE001  optional fields
        return 0, False


def sizes(connector: Any, reader: Reader) -> dict[str, Any]:
    """Return the sizes that `kvfix lab` needs to replay a recorder file, or {} if the connector lacks a size."""
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


class Offloading(Reader):
    """vLLM's OffloadingConnector (offloading/scheduler.py and worker.py, 0.32.0).

    Loads and stores are jobs of whole blocks. A job can take longer than a step, and a store can outlive its request.
    """

    #: Stores skip cached blocks. So the tokens in front of a store's first token may already be in the cache.
    leaves_out_stored = True

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self._scheduler = getattr(connector, "connector_scheduler", None)
        worker = getattr(connector, "connector_worker", None)
        #: Tokens per block of each KV group.
        self._sizes: list[int] = []
        if self._scheduler is not None:
            self._sizes = [group.tokens_per_block for group in self._scheduler.config.kv_group_configs]
        elif worker is not None:
            self._sizes = list(worker.spec.tokens_per_block)

    def settings(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        return {"chunk_size": self._scheduler.config.kv_group_configs[0].tokens_per_chunk}

    def loads(self, metadata: Any) -> Spans:
        return [(job.req_id, *span(job.dst_spec, self._sizes)) for job in metadata.load_jobs.values()]

    def stores(self, metadata: Any) -> Spans:
        """Leave out stores of ended requests, because no step computes an ended request."""
        statuses = getattr(self._scheduler, "_req_status", {})
        return [
            (job.req_id, *span(job.src_spec, self._sizes))
            for job in metadata.store_jobs.values()
            if job.req_id not in statuses or not statuses[job.req_id].req.is_finished()
        ]

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Leave out requests with jobs in flight, because the connector keeps these requests on purpose."""
        if self._scheduler is not None:
            requests = self._scheduler._req_status.items()
            yield "_req_status", {name for name, status in requests if not status.transfer_jobs}


def span(blocks: Any, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the token span (start, end) of an OffloadingConnector job, over all KV groups.

    Each KV group rounds the job's end up to a whole block. The smallest rounded end is nearest to the job's last token.
    blocks: the job's GPU blocks (GPULoadStoreSpec). sizes: tokens per block, by KV group.
    """
    groups = zip(blocks.block_indices, blocks.group_sizes, sizes, strict=True)
    spans = [(start * size, (start + count) * size) for start, count, size in groups if count]
    return (min(start for start, _ in spans), min(end for _, end in spans)) if spans else (0, 0)


class SimpleOffload(Reader):
    """vLLM's SimpleCPUOffloadConnector (v1/simple_kv_offload/manager.py 0.32.0).

    The metadata does not say which request has a block. So kvfix reads each request's tokens from the scheduler's
    manager. kvfix does not know the request of a store if the request has ended, or with `lazy_offload`.
    """

    leaves_out_stored = True

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        #: The scheduler's manager. None in the worker, and without prefix caching.
        self._manager: Any = getattr(connector, "scheduler_manager", None)
        #: _computed: tokens that vLLM had computed at a request's last hit. _stored: end of a request's last store.
        self._computed: dict[str, int] = {}
        self._stored: dict[str, int] = {}

    def hit(self, request: str) -> int | None:
        found = None if self._manager is None else self._manager._pending_cpu_hits.get(request)
        if found is None:
            return None
        _, tokens, computed = found
        self._keep(self._computed, self._manager._reqs_to_load)
        self._computed[request] = computed
        return int(computed + tokens)

    def settings(self) -> dict[str, Any]:
        return {} if self._manager is None else {"chunk_size": self._manager.block_size}

    def loads(self, metadata: Any) -> Spans:
        if self._manager is None:
            return None
        states = self._manager._reqs_to_load
        names = metadata.load_event_to_reqs.get(metadata.load_event, ())
        ends = {name: states[name].request.num_computed_tokens for name in names if name in states}
        return [(name, self._computed.get(name, end), end) for name, end in ends.items()]

    def stores(self, metadata: Any) -> Spans:
        if self._manager is None:
            return None
        found = []
        for name in self._manager._store_event_to_reqs.get(metadata.store_event, ()):
            blocks = self._manager._reqs_to_store[name].num_stored_blocks[self._manager.fa_gidx]
            start, end = self._stored.get(name, 0), blocks * self._manager.fa_block_size
            self._stored[name] = end
            found += [(name, start, end)] if start < end else []
        self._keep(self._stored, self._manager._reqs_to_store)
        return found

    def _keep(self, noted: dict[str, int], known: Collection[str]) -> None:
        if len(noted) > 2 * len(known) + 64:
            for name in [name for name in noted if name not in known]:
                del noted[name]

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Leave out requests with a load or store in flight, because the connector keeps these requests on purpose."""
        if self._manager is not None:
            loads, stores = self._manager._reqs_to_load.items(), self._manager._reqs_to_store.items()
            yield "_pending_cpu_hits", self._manager._pending_cpu_hits
            yield "_reqs_to_load", {name for name, state in loads if state.load_event is None}
            yield "_reqs_to_store", {name for name, state in stores if not state.store_events}
