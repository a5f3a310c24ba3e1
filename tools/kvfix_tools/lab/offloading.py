"""vLLM's OffloadingConnector in the lab, beside LMCache's connector in a MultiConnector.

Real: both its roles, its jobs, and the manager of its chunks in CPU memory. Replaced: the worker that copies between
GPU and CPU memory (v1/kv_offload/cpu/gpu_worker.py 0.32.0), which needs a GPU. Here a copy is done twice `delay` steps
after it was submitted, so that a load of the multi-process server can be faster, or when it is waited for. What changes
meanwhile at its source arrives as garbage: the copy runs beside the steps, and the connector waits for it before others
write there.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvfix_tools.lab.memory import GARBAGE, Slots
from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix_tools.lab.request_events import RequestEvents


class _Copy(NamedTuple):
    """`due`: the step in which it is done. places: (block, chunk, which of the chunk's blocks). found: its source."""

    due: int
    is_load: bool
    places: list[tuple[int, int, int]]
    found: list[list[int]]


class Copier(OffloadingWorker):  # type: ignore[misc]
    """In place of the worker that copies. chunks: the contents of each block of a chunk, by the chunk's number."""

    def __init__(self, slots: Slots, delay: int, blocks_per_chunk: int) -> None:
        self._slots = slots
        self._delay = delay
        self._blocks_per_chunk = blocks_per_chunk
        self.chunks: dict[int, list[list[int]]] = {}
        self.copies: dict[int, _Copy] = {}
        #: Loads that are done.
        self.loads = 0
        self._finished: list[int] = []
        self._now = 0

    def tick(self) -> None:
        """A step of the engine begins."""
        self._now += 1
        self._finish([job for job, copy in self.copies.items() if copy.due <= self._now])

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    def _submit(self, job_id: int, gpu: GPULoadStoreSpec, cpu: Any, is_load: bool) -> bool:
        first, chunks = gpu.block_indices[0] % self._blocks_per_chunk, cpu.block_ids.tolist()
        places = []
        for position, block in enumerate(gpu.block_ids.tolist(), first):
            number, part = divmod(position, self._blocks_per_chunk)
            places.append((block, chunks[number], part))
        self.copies[job_id] = _Copy(self._now + self._delay, is_load, places, self._read(is_load, places))
        return True

    def _read(self, is_load: bool, places: list[tuple[int, int, int]]) -> list[list[int]]:
        if is_load:
            return [self.chunks[chunk][part] for _, chunk, part in places]
        return [self._slots.read([block], 0, self._slots.block_size) for block, _, _ in places]

    def _finish(self, jobs: Collection[int]) -> None:
        for job in jobs:
            copy = self.copies.pop(job)
            self._finished.append(job)
            self.loads += copy.is_load
            found = self._read(copy.is_load, copy.places)
            for (block, chunk, part), before, now in zip(copy.places, copy.found, found, strict=True):
                contents = now if now == before else [GARBAGE] * len(now)
                if copy.is_load:
                    self._slots.write([block], 0, contents)
                else:
                    self.chunks.setdefault(chunk, [[]] * self._blocks_per_chunk)[part] = contents

    def get_finished(self) -> list[TransferResult]:
        self._finish([job for job, copy in self.copies.items() if copy.due <= self._now])
        finished, self._finished = self._finished, []
        return [TransferResult(job, True) for job in finished]

    def wait(self, job_ids: set[int]) -> None:
        self._finish([job for job in self.copies if job in job_ids])


class Offloading:
    """The OffloadingConnector in both roles, joined by the lab's memory."""

    events: RequestEvents

    def __init__(self, options: Options, slots: Slots, in_scheduler: Any, in_worker: Any) -> None:
        self.scheduler = in_scheduler.connector_scheduler
        config = self.scheduler.config
        self.copier = Copier(slots, 2 * options.delay, config.blocks_per_chunk)
        in_worker.connector_worker.worker = self.copier
        self._tokens_per_chunk = config.kv_group_configs[0].tokens_per_chunk
        self._watch(self.scheduler.manager)
        #: Blocks that others have taken since the last step.
        self.taken: set[int] = set()
        build = self.scheduler.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            """What others take is in no step of the scheduler, where those of an engine are."""
            self.scheduler._current_batch_allocated_block_ids |= self.taken
            self.taken.clear()
            return build(output)

        self.scheduler.build_connector_meta = build_connector_meta

    def _watch(self, manager: Any) -> None:
        """What is stored is compared with what belongs there, when the manager takes it for stored."""
        complete_store = manager.complete_store

        def completed(keys: Any, context: Any, success: bool = True) -> None:
            for key in keys if success else ():
                chunk = manager._policy.get(key)
                if chunk is not None and not chunk.is_ready:
                    self._stored(context.req_id, context.get_offload_key_position(key), chunk.chunk_id)
            complete_store(keys, context, success)

        manager.complete_store = completed

    def _stored(self, name: str, end: int, chunk: int) -> None:
        self.events.counts["stores_offloaded"] += 1
        start = end - self._tokens_per_chunk
        if list(chain.from_iterable(self.copier.chunks[chunk])) != self.events.right(name)[start:end]:
            self.events.wrong_content(name, f"the OffloadingConnector stores other KV as tokens {start} to {end}")

    def tick(self) -> None:
        self.copier.tick()
        self.events.counts["loads_offloaded"] += self.copier.loads
        self.copier.loads = 0

    @property
    def busy(self) -> bool:
        """Whether it has jobs that are not reported as done."""
        return bool(self.scheduler._jobs or self.copier.copies)

    def requests(self, loads: bool) -> set[str]:
        """Those with a load in flight, or with a store."""
        return {job.req_id for job in self.scheduler._jobs.values() if job.is_store != loads}

    def in_flight(self, request: str) -> set[str]:
        return {name for name, loads in (("loading", True), ("storing", False)) if request in self.requests(loads)}

    def kept(self) -> dict[str, set[str]]:
        return {"OffloadingConnector._req_status": set(self.scheduler._req_status)}
