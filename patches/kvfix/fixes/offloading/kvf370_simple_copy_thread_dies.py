"""Every load waits for ever after one failed copy: the copy thread of SimpleCPUOffloadConnector ends.

Symptom: The worker prints `Exception in thread` once, with `batch memcpy failed: err=`. With `kv_offload_backend`
"disk" the worker prints an `OSError`, such as `No space left on device`. (The cache file is sparse, so the disk may
become full after the start.) Then requests that hit the CPU memory stay in WAITING_FOR_REMOTE_KVS, and blocks that were
to be stored never become free. The engine gets slower, and stops.

Cause: The copy thread's loop does not catch exceptions (copy_backend.py 0.32.0:127, disk_backend.py:249, :283). The
thread records no event for the failed copy or for later copies. The worker reports only copies that have an event.

Fix: The copy thread continues after a failed copy, and the worker reports the failed copy to the scheduler. After a
failed store, the blocks become free. After a failed load, vLLM computes the tokens, or ends the request
(`kv_load_failure_policy`). No request finds a chunk whose copy has failed.
- Releases: vLLM 0.26.0 to 0.33.0. The fix needs 0.32.0 or later, whose workers can name the requests of failed loads.
- Remove when: `_copy_loop` catches an exception of a copy, and the worker reports the failed copy.
"""

import sys
from collections.abc import Callable
from functools import partial

from kvfix.fixes import _offloading, api, stubs
from kvfix.fixes.api import GO_ON, Any, Fix, Steps, View, engine_log, fix_after, fix_around, fix_before, fix_calls, note

#: Names of attributes. _REQUESTS: the worker's set of requests with a failed load. _STORES: the failed stores, in the
#: worker's report and in the scheduler.
_REQUESTS, _STORES = "_kvfix_failed_requests", "_kvfix_failed_stores"
#: The scheduler's part of the fix sets this attribute of the metadata. Workers then report failed copies.
_TOLD = "_kvfix_knows_failed_copies"

tells_worker = _offloading.tells_worker(_TOLD)
get_transfer_results = _offloading.reports_failed_loads("worker_handler", _REQUESTS)
all_stores_failed = _offloading.all_failed(_STORES, "completed_store_events")
aggregate = _offloading.combines_reports(_STORES, "completed_store_events")


class _Noting:
    """The queue of a copy thread. `item` is the last item that the thread took."""

    item: Any = None

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def get(self) -> Any:
        self.item = self._queue.get()
        return self.item


class _Events(list[Any]):
    """The worker's list of copies. An entry is (number of the copy, event). failed: numbers of the failed copies."""

    told = False  # True if the scheduler's part of the fix is active. If False, the worker reports no failed copy

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[int] = set()


def _recorded(module: Any, stream: Any) -> Any:
    try:
        event = module.torch.Event()
        event.record(stream)
    except Exception:  # noqa: BLE001 - the stream can record nothing any more
        return stubs.Stub(query=lambda: True, synchronize=lambda: None)
    return event


def _survives(least: int, place: int, noting: Callable[..., Any]) -> api.Fixing:
    """Let the loop of a copy thread go on after a failed copy.

    least: the number of arguments that the fix needs. With fewer arguments, the loop runs without the fix.
    place: the index of the copy's number in an item of the queue. The list of events is the next element.
    noting: a function of the loop's arguments. The result: a `_Noting` queue, arguments with the queue, a function.
    The latter function takes an item, and returns the stream that the item's failed copy may still use.
    """

    @fix_calls
    def loop(function: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < least:
            return function(*args, **kwargs)
        queue, given, stream = noting(*args)
        while True:
            try:
                return function(*given, **kwargs)
            except Exception as error:  # noqa: PERF203
                if queue.item is None or not getattr(queue.item[place + 1], "told", False):
                    raise
                taken, queue.item = queue.item, None
                number, events = taken[place : place + 2]
                engine_log.warning(f"KVF370: a copy of KV has failed: {type(error).__name__}: {error}")
                note(__name__, f"copy {number} has failed")
                events.failed.add(number)
                events.append((number, _recorded(sys.modules[function.__module__], stream(taken))))

    return loop


def _noting_gpu(q: Any, device: Any, load_stream: Any, store_stream: Any, *more: Any) -> tuple[Any, ...]:
    queue = _Noting(q)
    given = queue, device, load_stream, store_stream, *more
    return queue, given, lambda taken: store_stream if taken[3] else load_stream


def _noting_disk(name: str, backend: Any, device: Any, stream: Any) -> tuple[Any, ...]:
    queue = _Noting(getattr(backend, name))
    return queue, (View(backend, **{name: queue}), device, stream), lambda taken: stream


@fix_before()
def register_kv_caches(worker: Any, *_: Any) -> None:
    worker._load_events, worker._store_events = _Events(), _Events()


@fix_before(when=lambda worker, metadata: hasattr(metadata, _TOLD))
def bind_connector_metadata(worker: Any, metadata: Any) -> None:
    if isinstance(worker._load_events, _Events):
        worker._load_events.told = worker._store_events.told = True


def _all_loads_failed(worker: Any, answer: Any, *_: Any, **__: Any) -> Any:
    setattr(worker, _REQUESTS, {*getattr(worker, _REQUESTS, ()), *(answer[1] or ())})
    return answer


@fix_after(when=lambda worker, *_, **__: getattr(worker._load_events, "failed", None), on_fault=_all_loads_failed)
def get_finished(worker: Any, answer: Any, finished_req_ids: Any) -> None:
    """Report the loads that have failed."""
    failed = worker._load_events.failed
    done = {each for each in failed if each <= worker._load_hwm and each not in worker._pending_load_event_indices}
    names = [name for each in done for name in worker._connector_metadata.load_event_to_reqs.get(each, ())]
    setattr(worker, _REQUESTS, getattr(worker, _REQUESTS, set()).union(names))
    failed -= done


@fix_after(
    when=lambda worker, meta, *_, **__: meta is not None and getattr(worker._store_events, "failed", None),
    on_fault=all_stores_failed,
)
def build_connector_worker_meta(worker: Any, meta: Any) -> None:
    """Report the stores that have failed."""
    failed = worker._store_events.failed
    setattr(meta, _STORES, failed.intersection(meta.completed_store_events))
    failed.difference_update(meta.completed_store_events)


def _stores_failed(scheduler: Any, output: Any, *_: Any, **__: Any) -> Any:
    stores = getattr(output.kv_connector_worker_meta, "completed_store_events", ())
    setattr(scheduler, _STORES, {*getattr(scheduler, _STORES, ()), *stores})
    return GO_ON


@fix_around(
    when=lambda scheduler, output, *_, **__: (
        getattr(output, "failed_recving", None) or hasattr(output.kv_connector_worker_meta, _STORES)
    ),
    on_fault=_stores_failed,
)
def update_connector_output(scheduler: Any, output: Any) -> Steps:
    """Evict the blocks of a failed load from the cache in CPU memory, so that no request finds these blocks."""
    stores = getattr(output.kv_connector_worker_meta, _STORES, ())
    setattr(scheduler, _STORES, getattr(scheduler, _STORES, set()).union(stores))
    loads = [scheduler._reqs_to_load[name] for name in output.failed_recving if name in scheduler._reqs_to_load]
    yield
    for load in loads:
        scheduler.cpu_block_pool.evict_blocks(set(load.transfer_meta.cpu_block_ids))


def _end_store(scheduler: Any, event: int, *_: Any, **__: Any) -> None:
    """End the store and free its blocks. No request finds these blocks in CPU memory."""
    transfer = scheduler._store_event_to_blocks.get(event)
    if transfer is not None:
        scheduler._in_flight_store_gpu_blocks.difference_update(transfer.gpu_block_ids)
        scheduler._release_transfer_refs(scheduler._store_event_to_blocks.pop(event))
    for name in scheduler._store_event_to_reqs.pop(event, []):
        state = scheduler._reqs_to_store.get(name)
        if state is not None:
            state.store_events.discard(event)
            if state.finished and not state.store_events:
                scheduler._cleanup_store_request(name)


@fix_around(when=lambda scheduler, event, *_, **__: event in getattr(scheduler, _STORES, ()), on_fault=_end_store)
def _process_store_event(scheduler: Any, event: int) -> Steps:
    getattr(scheduler, _STORES).discard(event)
    if event not in scheduler._store_event_to_blocks:  # a reset has dropped the store
        return (yield)
    return _end_store(scheduler, event)


FIX = Fix(
    # 0.26.0 has the bug too, but its workers cannot name failed loads, and its functions differ from 0.32's functions.
    api.SIMPLE_COPIES._copy_loop(broken=">=0.32", fix=_survives(4, 4, _noting_gpu), helper=True),
    api.SIMPLE_DISK._store_loop(broken=">=0.32", fix=_survives(3, 2, partial(_noting_disk, "_store_queue"))),
    api.SIMPLE_DISK._load_loop(broken=">=0.32", fix=_survives(3, 2, partial(_noting_disk, "_load_queue"))),
    api.SIMPLE_WORKER.register_kv_caches(broken=">=0.32", fix=register_kv_caches, helper=True),
    api.SIMPLE_WORKER.bind_connector_metadata(broken=">=0.32", fix=bind_connector_metadata, helper=True),
    api.SIMPLE_SCHEDULER.build_connector_meta(broken=">=0.32", fix=tells_worker, helper=True),
    api.SIMPLE_WORKER.get_finished(broken=">=0.32", fix=get_finished, helper=True),
    api.SIMPLE_WORKER.build_connector_worker_meta(broken=">=0.32", fix=build_connector_worker_meta, helper=True),
    api.SIMPLE_WORKER_METADATA.aggregate(broken=">=0.32", fix=aggregate, helper=True),
    api.CONNECTOR_BASE.get_transfer_results(broken=">=0.32", fix=get_transfer_results, helper=True),
    api.SIMPLE_SCHEDULER.update_connector_output(broken=">=0.32", fix=update_connector_output, helper=True),
    api.SIMPLE_SCHEDULER._process_store_event(broken=">=0.32", fix=_process_store_event, helper=True),
    effect="hang",
    evidence={"KVD629": "", "KVD999": ""},
    scenarios=("simple-offload-copy-fails",),
    attaches=api.AT_START,  # the thread already runs
)
