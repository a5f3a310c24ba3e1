"""vLLM's OffloadingConnector in the lab. offload_copies.py replaces only copies, streams, events and threads."""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, get_offload_group_idx

from kvfix.connector_events import readers
from kvfix_tools.lab.connectors.connector import Connector
from kvfix_tools.lab.connectors.offload_copies import Copies, Tiers
from kvfix_tools.lab.engine import kv_layout, vllm_objects
from kvfix_tools.lab.engine.byte_memory import contents_of
from kvfix_tools.lab.engine.kv_layout import kv_groups
from kvfix_tools.lab.engine.memory import NOTHING, Cache, Slots
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options
from kvfix_tools.roundtrip.backends.vllm_offload import offload

#: The id of an invented request. `evict` reserves chunks for this request, so that the manager evicts old chunks.
_OTHERS = "others"


class BothRoles:
    """An offloading connector in the scheduler and worker roles, with the lab's memory."""

    events: RequestEvents
    #: True if the engine has only this connector. If False, the lab records no events for loads and stores.
    alone = False
    #: Reads the connector's own state in the scheduler role (kvfix.connector_events.readers).
    reader: Any

    def __init__(self, options: Options, ranks: Sequence[Any]) -> None:
        self.ranks = ranks
        for rank in ranks:
            rank.owner = self
        self._groups = kv_groups(options)

    def has_loaded(self, rank: int, name: str, span: tuple[int, int], several_groups: bool, fails: bool) -> None:
        """Count a load. `loads_offloaded` counts only rank 0's loads. Record the load if `alone` is True."""
        self.events.counts["loads_offloaded"] += not rank
        self.events.counts["loads_of_groups"] += several_groups
        if self.alone:
            start, end = span
            self.events.loaded(name, start if fails else end, 0 if fails else end - start, rank)

    def tick(self) -> None:
        for rank in self.ranks:
            rank.tick()

    def take_due(self, metadata: Any) -> None:
        """Read the loads from the metadata of a step. The lab does not call this method in a MultiConnector."""

    def others_take(self, blocks: Collection[int]) -> None:
        """Give GPU blocks to other requests. The connector must first finish all copies from or to these blocks."""

    def never_given_back(self) -> None: ...

    def close(self) -> None: ...


class Rank(Copies):
    def __init__(self, rank: int, slots: Slots, options: Options, in_worker: Any) -> None:
        super().__init__(rank, slots, options)
        self.connector = in_worker.connector_worker
        offload("cpu")  # replaces the CUDA streams of vLLM's worker, because the lab copies on the CPU
        self._failed: set[int] = set()
        spec = self.connector.spec
        spec.get_worker = spec.create_worker  # get_worker needs a GPU
        self.connector.register_kv_caches(kv_layout.kv_caches(options, self.gpu))
        worker = self.connector.worker
        for handler in (worker._store_handler, worker._load_handler):
            self.take(handler)
        #: The CPU memory of this rank, with a row for each chunk.
        self.chunks = worker._store_handler.dst_tensors[0].numpy()
        self._wrap(worker)

    def _wrap(self, worker: Any) -> None:
        submit_load, submit_store, get_finished = worker.submit_load, worker.submit_store, worker.get_finished

        def load(job: int, source: Any, to: Any) -> Any:
            name = self.connector._load_jobs[job]
            fails = self.failing.pop(name, None) is not None
            self._failed.update([job] if fails else [])
            with self.of_job(fails, lambda: self.owner.loaded(self.rank, name, to, fails)):
                return submit_load(job, source, to)

        def store(job: int, source: Any, to: Any) -> Any:
            jobs = self.owner.scheduler._jobs
            name = str(jobs[job].req_id) if job in jobs else ""
            fails = name in self.failing_stores
            self.failing_stores.discard(name)
            self._failed.update([job] if fails else [])
            self.chunks[to.block_ids.tolist()] = NOTHING  # a copy may fill only a part of the chunk
            with self.of_job(fails):
                return submit_store(job, source, to)

        def finished() -> Any:
            done = [replace(each, success=each.job_id not in self._failed) for each in get_finished()]
            self._failed.difference_update(each.job_id for each in done)
            return done

        worker.submit_load, worker.submit_store, worker.get_finished = load, store, finished

    def contents(self, chunk: int, part: int, size: int) -> list[int]:
        return contents_of(self.chunks[chunk, part * self.gpu.shape[1] :], size)


class Offloading(BothRoles):
    def __init__(self, options: Options, ranks: Sequence[Rank], scheduler: Any, in_scheduler: Any) -> None:
        super().__init__(options, ranks)
        self.reader = readers.Offloading(in_scheduler)
        self.scheduler = in_scheduler.connector_scheduler
        self.manager = self.scheduler.manager
        self.tiers = Tiers(self.manager, options.delay)
        self._per_chunk = self.scheduler.config.blocks_per_chunk
        #: The manager of the CPU memory, which is the primary tier if there are secondary tiers.
        self.memory = getattr(self.manager, "primary_tier", self.manager)
        self._watch(self.manager)
        #: Blocks that `others_take` has given to other requests since the last step.
        self._taken: set[int] = set()
        build = self.scheduler.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            """Add the blocks of `others_take`. In a real engine, the scheduler output names these blocks."""
            self.scheduler._current_batch_allocated_block_ids |= self._taken
            self._taken.clear()
            return build(output)

        self.scheduler.build_connector_meta = build_connector_meta

    def loaded(self, rank: int, name: str, to: Any, fails: bool) -> None:
        """Record the end of a load. to: the GPU blocks that the load writes."""
        span = readers.span(to, [group.block_size for group in self._groups])
        self.has_loaded(rank, name, span, sum(map(bool, to.group_sizes)) > 1, fails)

    def _watch(self, manager: Any) -> None:
        """Check the content of each chunk when the manager completes the store of the chunk."""
        complete_store = manager.complete_store

        def completed(keys: Any, context: Any, success: bool = True) -> None:
            ends = []
            for key in keys if success else ():
                chunk = self.memory._policy.get(key)
                if chunk is not None and not chunk.is_ready:
                    group = self._groups[get_offload_group_idx(key)]
                    end = context.get_offload_key_position(key)
                    self._stored(context.req_id, group, end, chunk.chunk_id)
                    ends += [end] if not group.number else []
            complete_store(keys, context, success)
            if self.alone and ends:
                note_stored(self.events, context.req_id, sorted(ends), self._per_chunk * self._groups[0].block_size)

        manager.complete_store = completed

    def _stored(self, name: str, group: Any, end: int, chunk: int) -> None:
        self.events.counts["stores_offloaded"] += 1
        self.events.counts["stores_of_groups"] += bool(group.window)
        size, start = group.block_size, end - self._per_chunk * group.block_size
        right = group.right(self.events.model.right(name)[start:end])
        for rank in self.ranks:
            found = [rank.contents(chunk, part, size) for part in range(self._per_chunk)]
            for part, contents in enumerate(found):
                # the connector stores only those blocks of a window that vLLM keeps
                if contents != right[part * size : (part + 1) * size] and (any(contents) or not group.window):
                    where = f" in KV group {group.number}" if group.window else ""
                    message = f"OffloadingConnector stores wrong KV for tokens {start} to {end}{where}"
                    self.events.wrong_content(name, message)
                    return

    def tick(self) -> None:
        self.tiers.tick()
        super().tick()

    def others_take(self, blocks: Collection[int]) -> None:
        self._taken.update(blocks)

    def evict(self, chunks: int, forced: bool) -> int:
        """Reserve space for `chunks` new chunks: this evicts old chunks. forced: delete files of a tier instead."""
        if forced:
            return self.tiers.delete_files(chunks)
        memory, context = self.memory, ReqContext(req_id=_OTHERS)
        before = memory._num_evictable_cache_chunks
        keys = [f"{_OTHERS} {number}".encode() + bytes(4) for number in range(min(chunks, memory._num_chunks))]
        store = memory.prepare_store(keys, context) if keys else None
        if store is None:
            return 0
        memory.complete_store(store.keys_to_store, context, success=False)
        return int(before - memory._num_evictable_cache_chunks)

    @property
    def busy(self) -> bool:
        copying = any(rank.pending for rank in self.ranks)
        return bool(self.scheduler._jobs or copying or self.manager.has_pending_work() or self.tiers.looking)

    def requests(self, loads: bool) -> set[str]:
        return {job.req_id for job in self.scheduler._jobs.values() if job.is_store != loads}

    def kept(self) -> dict[str, set[str]]:
        return {"OffloadingConnector._req_status": set(self.scheduler._req_status), **self.tiers.kept()}

    def close(self) -> None:
        self.manager.shutdown()


def note_stored(events: RequestEvents, name: str, ends: list[int], size: int) -> None:
    """Record the stored chunks of a request, adjacent chunks as one event. ends: sorted chunk ends in tokens."""
    tokens = events.model.requests[name].all_token_ids
    for _, numbered in groupby(enumerate(ends), lambda numbered: numbered[1] - numbered[0] * size):
        run = [end for _, end in numbered]
        events.stored(name, list(tokens[: run[-1]]), run[0] - size, run[-1])


class Alone(Connector):
    def __init__(self, options: Options, memories: Sequence[Slots], caches: Sequence[Cache]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvfix-lab-") if options.tier == "fs" else None
        config = vllm_objects.vllm_config(options, self._folder.name if self._folder else "")
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self.scheduler.connector
        called = [vllm_objects.worker(options, vllm_objects.of_rank(config, rank)) for rank, _ in enumerate(memories)]
        self.offloading = self._offloads(options, memories, self.in_scheduler, called)
        self.offloading.alone = True
        self.reader = self.offloading.reader
        each_rank = zip(self.offloading.ranks, memories, called, strict=True)
        self.workers = [Worker(own.rank, slots, worker, worker, None, own.failing) for own, slots, worker in each_rank]
        for worker in self.workers:
            worker.offloads = worker.by_request = True

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return int(self.offloading.evict(chunks, forced))

    def metadata(self, metadata: Any) -> Any:
        self.offloading.take_due(metadata)
        return metadata

    def is_looking(self, request: str) -> bool:
        return request in self.events.undecided

    def not_to_store(self, request: Any) -> str:
        asked = (request.kv_transfer_params or {}).get("max_offload_tokens")
        return "the request has max_offload_tokens 0" if asked == 0 else ""
