"""Readers of vLLM's own connectors that keep KV in the CPU's memory: OffloadingConnector, SimpleCPUOffloadConnector."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvfix.engine_state.reader import Reader, Spans


class Offloading(Reader):
    """vLLM's OffloadingConnector (offloading/scheduler.py and worker.py, 0.32.0).

    Loads and stores are jobs. A job can take longer than a step, and a store longer than its request. Jobs move whole
    blocks.
    """

    leaves_out_stored = True

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self._scheduler = getattr(connector, "connector_scheduler", None)
        worker = getattr(connector, "connector_worker", None)
        #: Tokens of a block, by KV group.
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
        """Leave out stores of ended requests: no step computes these requests any more.

        The end is a lower bound: a store may leave out blocks, and these are not counted.
        """
        return [
            (job.req_id, *span(job.src_spec, self._sizes))
            for job in metadata.store_jobs.values()
            if not self._has_ended(job.req_id)
        ]

    def _has_ended(self, request: str) -> bool:
        status = getattr(self._scheduler, "_req_status", {}).get(request)
        return status is not None and status.req.is_finished()

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Leave out requests with jobs in flight: the connector keeps these on purpose."""
        if self._scheduler is not None:
            requests = self._scheduler._req_status.items()
            yield "_req_status", {name for name, status in requests if not status.transfer_jobs}


def span(blocks: Any, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the first token and the end of a job of the OffloadingConnector, over all KV groups.

    In each KV group the job ends with a whole block. So the smallest end among the groups is nearest to the last token
    of the job.
    blocks: GPULoadStoreSpec, the job's GPU blocks. sizes: tokens of a block, by KV group.
    """
    groups = zip(blocks.block_indices, blocks.group_sizes, sizes, strict=True)
    spans = [(start * size, (start + count) * size) for start, count, size in groups if count]
    return (min(start for start, _ in spans), min(end for _, end in spans)) if spans else (0, 0)


class SimpleOffload(Reader):
    """vLLM's SimpleCPUOffloadConnector (v1/simple_kv_offload/manager.py 0.32.0).

    The metadata only have blocks, of all requests together. The scheduler's manager knows their tokens. Stores of ended
    requests, and stores with `lazy_offload`, belong to no request.
    """

    leaves_out_stored = True
    #: kvfix drops notes of requests that the connector no longer knows, if there are more notes than twice the known
    #: requests plus this number.
    _SPARE = 64

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        #: None in the worker, and without prefix caching.
        self._manager: Any = getattr(connector, "scheduler_manager", None)
        #: Both by request. `_computed`: the tokens that vLLM had when a hit was found. `_stored`: the end of what was
        #: stored last.
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
        if len(noted) > 2 * len(known) + self._SPARE:
            for name in [name for name in noted if name not in known]:
                del noted[name]

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Leave out requests with a load or store in flight: the connector keeps these on purpose."""
        if self._manager is not None:
            loads, stores = self._manager._reqs_to_load.items(), self._manager._reqs_to_store.items()
            yield "_pending_cpu_hits", self._manager._pending_cpu_hits
            yield "_reqs_to_load", {name for name, state in loads if state.load_event is None}
            yield "_reqs_to_store", {name for name, state in stores if not state.store_events}
