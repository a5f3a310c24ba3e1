"""Replace the GPU driver's copies, streams and events, and the threads of offloading connectors.

Runs with the same seed must not differ, so threads must not change the order of events. A copy (byte_memory.py) ends
some steps after vLLM submits the copy, or when vLLM waits for the copy's GPU event.
"""

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvfix_tools.lab.connectors.connector import nothing
from kvfix_tools.lab.engine import byte_memory
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.options import Options
from kvfix_tools.roundtrip import cuda_stand_in


class Copies:
    """The copies of one rank between its slots and its CPU memory. gpu: a tensor with a row of bytes per GPU block."""

    #: The object with both roles of the connector (`BothRoles`).
    owner: Any

    def __init__(self, rank: int, slots: Slots, options: Options) -> None:
        self.rank = rank
        #: The next load of each request in `failing` fails. The next store of each request in `failing_stores` fails.
        self.failing: dict[str, int] = {}
        self.failing_stores: set[str] = set()
        self._delay = 2 * options.delay + (options.rank_delay if rank else 0)
        self.gpu = byte_memory.tensor(slots, options, rank).view(torch.int8).flatten(1)
        self.now = 0
        self.pending: deque[byte_memory.Copy] = deque()
        self.last: byte_memory.Copy | None = None
        self._fails, self._done = False, nothing

    def take(self, handler: Any) -> None:
        """Make the handler copy through this object. OffloadingConnector's worker has a handler for each direction."""
        handler._swap_blocks_batch = self._swap
        handler._event_pool = SimpleNamespace(pop=lambda: Event(self), append=nothing, clear=nothing)

    def tick(self) -> None:
        self.now += 1
        self.finish(self.now)

    @contextmanager
    def of_job(self, fails: bool = False, done: Callable[[], None] = nothing) -> Iterator[None]:
        """In this context, all copies belong to one job. fails: copy nothing. done: called when the copies end."""
        self._fails, self._done = fails, done
        self.last = None
        yield
        if self.last is None:
            done()

    def _swap(self, source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        self._submit([] if self._fails else zip(source.tolist(), to.tolist(), sizes.tolist(), strict=True))

    def batch(self, to: int, source: int, sizes: int, count: int, *_: Any) -> int:
        """Replaces the driver's cuMemcpyBatchAsync. Gets the addresses of arrays. Returns 0, or 1 for an error."""
        if self._fails:
            return 1
        arrays = [(ctypes.c_uint64 * count).from_address(array) for array in (source, to, sizes)]
        self._submit(zip(*arrays, strict=True))
        return 0

    def _submit(self, pieces: byte_memory.Pieces) -> None:
        self.last = byte_memory.Copy(pieces, self.now + self._delay, self._done)
        self.pending.append(self.last)

    def finish(self, now: int) -> None:
        while self.pending and self.pending[0].due <= now:
            self.pending.popleft().arrive()

    def is_done(self, copy: byte_memory.Copy | None) -> bool:
        return copy is None or copy not in self.pending


class Event:
    """Replaces a GPU event. The event is done when the last copy before `record` has ended."""

    _copy: byte_memory.Copy | None = None

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies: Any = copies

    def record(self, stream: Any = None) -> None:
        self._copies = getattr(stream, "copies", self._copies)
        self._copy = self._copies.last

    def query(self) -> bool:
        return bool(self._copies.is_done(self._copy))

    def synchronize(self) -> None:
        if not self.query() and self._copy is not None:
            self._copies.finish(self._copy.due)

    def elapsed_time(self, later: Any) -> float:
        return 1.0


class AtOnce:
    """Replaces a thread's queue. `put` runs the thread's loop with the item."""

    #: The thread's loop. `get` returns one item, and then None, which ends the loop.
    run: Any

    def __init__(self) -> None:
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        if item is not None:
            self._items = [item, None]
            self.run()

    def get(self) -> Any:
        return self._items.pop(0)


class CopyQueue(AtOnce):
    """Replaces the queue to SimpleCPUOffloadConnector's copy thread. After an exception, `put` does nothing."""

    copies: Copies
    died = False

    def put(self, item: Any) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        if self.died:
            return
        cuda_mem_ops._batch_memcpy = self.copies.batch, 0
        try:
            super().put(item)
        except Exception:  # noqa: BLE001 - as in a thread: no caller gets the exception
            self.died = True


@functools.cache
def stand_in() -> None:
    """Replace the GPU for all workers of this process."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    def thread(target: Any, args: tuple[Any, ...], **_: Any) -> Any:
        """Replaces the copy thread. After `start`, the queue runs the thread's loop at each `put`."""
        return SimpleNamespace(start=lambda: setattr(args[0], "run", functools.partial(target, *args)))

    vars(worker).update(torch=cuda_stand_in.Torch(), PIN_MEMORY=False)
    with_events: Any = cuda_stand_in.Torch()
    with_events.Event = Event
    vars(copy_backend).update(
        torch=with_events,
        current_platform=SimpleNamespace(set_device=lambda device: None),
        queue=SimpleNamespace(SimpleQueue=CopyQueue),
        threading=SimpleNamespace(Thread=thread),
    )
    cuda_mem_ops._batch_memcpy = None, 0


class Tiers:
    """Delays the results of OffloadingConnector's secondary tiers by `delay` steps.

    `submit_*` waits for the tier's threads, so that a lookup in the same step finds the same files in each run.
    """

    def __init__(self, manager: Any, delay: int) -> None:
        self._manager, self._delay, self._now = manager, delay, 0
        tiers = list(getattr(manager, "secondary_tiers", ()))
        #: The original `get_finished_jobs` of each tier.
        self._finished: list[Callable[[], Iterable[Any]]] = []
        #: (step in which to report the result, result) of each finished job
        self._held: list[tuple[int, Any]] = []
        for tier in tiers:
            self._finished.append(tier.get_finished_jobs)
            drain = tier.drain_jobs
            tier.submit_store, tier.submit_load = _then(tier.submit_store, drain), _then(tier.submit_load, drain)
            tier.get_finished_jobs, tier.drain_jobs = self._due, self._report_all
        self._lookups = [tier._lookup_manager for tier in tiers if hasattr(tier, "_lookup_manager")]
        for lookups in self._lookups:
            lookups._lookup_queue.put(None)  # ends the lookup thread
            lookups._thread.join()
            lookups._lookup_queue = AtOnce()
            lookups._lookup_queue.run = lookups._worker
        self._files = [Path(tier.file_mapper.base_path) for tier in tiers if hasattr(tier, "file_mapper")]

    def tick(self) -> None:
        self._now += 1
        self._hold(self._delay - 1)

    def _hold(self, steps: int) -> None:
        for finished in self._finished:
            self._held += [(self._now + steps, done) for done in sorted(finished(), key=lambda done: done.job_id)]

    def _due(self) -> Iterable[Any]:
        due = [done for when, done in self._held if when <= self._now]
        self._held = [(when, done) for when, done in self._held if when > self._now]
        return due

    def _report_all(self) -> None:
        """Make all results due now, as a tier does at a reset."""
        self._held = [(self._now, done) for _, done in self._held]
        self._hold(0)

    @property
    def looking(self) -> bool:
        return any(lookups._lookup_batch for lookups in self._lookups)

    def delete_files(self, how_many: int) -> int:
        """Delete the first files in the order of their paths, as other processes may do."""
        files = sorted(path for folder in self._files for path in folder.parent.rglob("*.bin"))[:how_many]
        for path in files:
            path.unlink()
        return len(files)

    def kept(self) -> dict[str, set[str]]:
        kept = {"TieringOffloadingManager._req_state": set(getattr(self._manager, "_req_state", ()))}
        for lookups in self._lookups:
            kept["AsyncLookupManager._req_keys"] = set(lookups._req_keys)
        return kept


def _then(submit: Callable[[Any], None], drain: Callable[[], None]) -> Callable[[Any], None]:
    def submitted(job: Any) -> None:
        submit(job)
        drain()

    return submitted
