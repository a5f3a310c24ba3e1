"""LMCache's multi-process connectors in the lab: LMCache's own and vLLM's in-tree copy, both roles, without a server.

Real: the connector classes, their trackers and metadata, LMCache's scheduler and worker adapters with their futures.
Stand-ins: the client that speaks to the server (a server of the lab answers, after as many steps as the options say),
and the transfer context, which copies between the lab's slots and chunks.
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvfix_tools.lab.memory import Cache, Prefix, Slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"


class Heartbeat:
    """In place of LMCache's HeartbeatThread: it beats once in each step."""

    def __init__(self, server: Server, health_event: Any, instance_id: int | None = None, **more: Any) -> None:
        self._server = server
        self._event = health_event
        self.is_of_worker = instance_id is not None
        self.stop_requested = False
        self._recover: Callable[[], bool] = lambda: True

    def register_recover_callback(self, callback: Callable[[], bool]) -> None:
        self._recover = callback

    def start(self) -> None:
        self._server.heartbeats.append(self)

    def stop(self, *_: Any, **__: Any) -> None:
        self.stop_requested = True

    def beat(self) -> None:
        if not self._event.is_set() and self._recover():
            self._event.set()


class Server:
    """In place of `lmcache server`: lookups that lock, prefetch status, loads and stores, done some steps later."""

    def __init__(self, slots: Slots, cache: Cache, chunk_size: int, delay: int) -> None:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        server = self

        class Future(MessagingFuture):  # type: ignore[misc]
            """Who waits for it lets time pass: what is under way is done, in its order, until this is."""

            def wait(self, timeout: float | None = None) -> bool:
                while not self.query() and server._later:
                    server._later.popleft()[-1]()
                return bool(super().wait(0))

        self._future = Future
        self.slots = slots
        self.cache = cache
        self.chunk_size = chunk_size
        self.delay = delay
        self.now = 0
        self.unanswered = 0
        self.flushes = _flushes()
        self.heartbeats: list[Heartbeat] = []
        #: Whether it knows the worker's KV memory.
        self.registered = True
        self.failing: dict[str, int] = {}
        self.loading: set[str] = set()
        #: request -> chunks found; None: the prefetch is under way
        self._hits: dict[str, int | None] = {}
        #: When it is due, whether it is a load, and what is done then.
        self._later: deque[tuple[int, bool, Callable[[], None]]] = deque()
        self.on_load: Callable[[str, int, int, int], None] = lambda *_: None
        self.on_store: Callable[[str, list[int], int, int], None] = lambda *_: None
        self.on_wrong: Callable[[str, str], None] = lambda *_: None
        #: The right contents of a request's tokens, for what is stored of it.
        self.right: Callable[[str], list[int]] = lambda _: []

    def tick(self) -> None:
        """A step of the engine has begun: what is due by now happens."""
        self.now += 1
        for heartbeat in self.heartbeats:
            heartbeat.beat()
        while self._later and self._later[0][0] <= self.now:
            self._later.popleft()[-1]()

    def lose_loads(self, unheard: set[str]) -> None:
        """Loads under way are never done, those of `unheard` were for nothing; stores and lookups are done at once."""
        under_way, self._later = self._later, deque()
        for _, is_load, action in under_way:
            if not is_load:
                action()
        for name in sorted(self.loading | unheard):
            self.cache.unpin(name)
            self.on_load(name, 0, 0, 0)
        self.loading.clear()

    @property
    def busy(self) -> int:
        return len(self._later)

    def keys(self, tokens: Any, end: int, salt: str) -> tuple[list[Any], list[int]]:
        """Keys of the whole chunks up to `end`, and the right contents: a key stands for all tokens up to its chunk."""
        contents = Prefix(hash((1, salt or 1))).of(list(tokens[:end]))
        ends = range(self.chunk_size, end + 1, self.chunk_size)
        return [(salt, contents[last - 1]) for last in ends], contents

    def answer(self, result: Any) -> Any:
        future = self._future()
        future.set_result(result)
        return future

    def later(self, action: Callable[[], Any], is_load: bool = False) -> Any:
        """A future of what `action` returns when it is due."""
        future = self._future()
        if self.delay:
            self._later.append((self.now + self.delay, is_load, lambda: future.set_result(action())))
        else:
            future.set_result(action())
        return future

    # What the adapters ask of their client, by its own names.

    def get_chunk_size(self) -> Any:
        return self.answer(self.chunk_size)

    def get_experimental(self) -> Any:
        return self.answer([])

    def lookup(self, key: Any, tp_size: int) -> Any:
        if self.unanswered > 0:
            self.unanswered -= 1
            self._hits[key.request_id] = 0
            return self.answer(None)

        self._hits[key.request_id] = None

        def prefetch() -> None:
            if key.request_id in self._hits:
                keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
                self._hits[key.request_id] = self.cache.pinned_prefix(keys, key.request_id)

        self.later(prefetch)
        return self.answer(None)

    def query_prefetch_status(self, request_id: str) -> Any:
        return self.answer(self._hits.get(request_id, 0))

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
        self._unlock(key.request_id, keys[key.start // self.chunk_size :])
        return self.answer(None)

    def end_session(self, request_id: str) -> Any:
        self._hits.pop(request_id, None)
        return self.answer(None)

    def _unlock(self, request_id: str, keys: list[Any]) -> None:
        held = [key for key in self.cache.pins.get(request_id, ()) if key not in keys]
        if held:
            self.cache.pins[request_id] = held
        else:
            self.cache.unpin(request_id)

    def report_block_allocation(self, *args: Any) -> Any:
        return self.answer(None)

    def clear(self, *args: Any) -> Any:
        return self.answer(None)

    def close(self) -> None:
        """The lab's server ends with its world."""

    # What the worker adapter asks of its transfer context.

    def register(self, *args: Any, **more: Any) -> None:
        self.registered = True

    def forget_silent_worker(self) -> None:
        """As the server does when `worker_registration_grace_seconds` are over."""
        self.registered = any(heartbeat.is_of_worker for heartbeat in self.heartbeats)

    def create_recorded_event(self) -> Any:
        return None

    def flush_inflight_stores(self, *args: Any, **more: Any) -> None:
        """All that is under way is done before this returns, in releases whose transfer on CUDA waits for it at all.

        (LMCacheDrivenTransferContext, what LMCache chooses on CUDA, does nothing here up to 0.5.5.)
        """
        while self.flushes and self._later:
            self._later.popleft()[-1]()

    def submit_store(self, request_id: str, key: Any, *rest: Any, **more: Any) -> Any:
        blocks = _block_ids(rest)
        self.on_store(request_id, list(key.token_ids), key.start, key.end)

        def store() -> bool:
            if not self.registered:
                return False
            keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
            right = self.right(request_id)
            for number in range(key.start // self.chunk_size, len(keys)):
                begin = number * self.chunk_size
                read = [self.slots.get(slot) for slot in self._slots(blocks, begin - key.start)]
                if read != right[begin : begin + self.chunk_size]:
                    self.on_wrong(request_id, f"other KV than that of tokens {begin} on is stored under their key")
                self.cache.put(keys[number], read)
            return True

        return self.later(store)

    def submit_retrieve(self, request_id: str, key: Any, *rest: Any, skip_first_n_tokens: int = 0, **more: Any) -> Any:
        blocks = _block_ids(rest)
        self.loading.add(request_id)

        def load() -> bool:
            self.loading.discard(request_id)
            keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
            wanted = keys[key.start // self.chunk_size :]
            found = [self.cache.get(each) for each in wanted]
            self._unlock(request_id, wanted)
            if request_id in self.failing or None in found or not self.registered:
                self.failing.pop(request_id, None)
                self.on_load(request_id, key.start, 0, 0)
                return False
            for number, contents in enumerate(found):
                offset = number * self.chunk_size
                for index, slot in enumerate(self._slots(blocks, offset)):
                    if offset + index >= skip_first_n_tokens and contents is not None:
                        self.slots.put(slot, contents[index])
            self.on_load(request_id, key.start, key.end, key.end - key.start)
            return True

        return self.later(load, is_load=True)

    def _slots(self, blocks: list[int], offset: int) -> list[int]:
        size = self.slots.block_size
        positions = range(offset, offset + self.chunk_size)
        return [blocks[position // size] * size + position % size for position in positions]


def _block_ids(arguments: tuple[Any, ...]) -> list[int]:
    """The blocks of the one KV cache group among a transfer's arguments: their place and nesting differ by release."""
    found: list[Any] = next(argument for argument in arguments if isinstance(argument, list))
    return found[0] if found and isinstance(found[0], list) else found


@functools.cache
def _flushes() -> bool:
    """Whether the installed release's transfer on CUDA has more than `pass` where it should wait for its stores."""
    try:
        module = import_module("lmcache.v1.multiprocess.transfer_context.worker_transfer")
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
    except ImportError:
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "LMCacheDrivenTransferContext":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "flush_inflight_stores":
                    return any(not isinstance(line, ast.Pass | ast.Expr) for line in method.body)
    return False


def _without_gpu() -> None:
    """vLLM's copy records a CUDA event to order the transfer after the step; here each step is done when it returns."""
    if torch.cuda.is_available():
        return
    event = SimpleNamespace(record=lambda *_: None, ipc_handle=lambda: b"")
    cuda: Any = torch.cuda
    cuda.Event = lambda **_: event
    cuda.current_stream = lambda: None
    cuda.stream = lambda *_: nullcontext()


class Queue:
    """The server behind the message queue of the releases before 0.5.6: requests by type, payloads in a list."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def submit_request(self, request_type: Any, payloads: list[Any], response_class: Any = None) -> Any:
        return getattr(self._server, request_type.name.lower())(*payloads)

    def close(self) -> None:
        """The lab's server ends with its world."""


class MP:
    """Both sides of the connector, joined by the lab's server."""

    def __init__(self, make: Callable[[str], Any], config: VllmConfig, slots: Slots, cache: Cache, delay: int) -> None:
        chunk = config.kv_transfer_config.get_from_extra_config("lmcache.chunk_size", 0)
        self.server = Server(slots, cache, chunk, delay)
        adapter: Any = import_module(ADAPTER)
        if hasattr(adapter, "RequestClientFactory"):
            adapter.RequestClientFactory = SimpleNamespace(create=lambda url, context=None: self.server)
        else:
            adapter.MessageQueueClient = lambda url, context: Queue(self.server)
        adapter.HeartbeatThread = functools.partial(Heartbeat, self.server)  # no threads
        adapter.create_transfer_context = lambda *_, **__: self.server
        adapter.vllm_layout_hints = dict  # it asks the model
        _without_gpu()
        #: In this step the worker hears nothing from the server.
        self.deaf = False
        self.connector = make("scheduler")
        self.worker = make("worker")
        self.scheduler_adapter = self.connector.scheduler_adapter
        self.worker_adapter = self.worker.worker_adapter
        self.worker_adapter.register_kv_caches({})
        if hasattr(self.worker_adapter, "_block_ids_per_group"):
            self.worker_adapter._block_ids_per_group = lambda op: [op.flat_block_ids]

    def listen(self, on_load: Any, on_store: Any, on_wrong: Any, right: Any, on_timeout: Any) -> None:
        self.server.on_load, self.server.on_store, self.server.on_wrong = on_load, on_store, on_wrong
        self.server.right = right

    def tick(self) -> None:
        self.server.tick()

    def put(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt."""
        keys, contents = self.server.keys(prompt, len(prompt), "")
        size = self.server.chunk_size
        for number, key in enumerate(keys):
            self.server.cache.put(key, contents[number * size : (number + 1) * size])

    def fail_load(self, request: str, after_chunks: int) -> None:
        self.server.failing[request] = after_chunks

    def lose_loads(self) -> None:
        self.deaf = True

    def lookup_times_out(self) -> None:
        adapter = self.scheduler_adapter
        for event in getattr(adapter, "_health_events", {"": getattr(adapter, "_health_event", None)}).values():
            event.clear()

    def lookups_fail(self, how_many: int) -> None:
        self.server.unanswered = how_many

    def hit(self, request: str) -> int | None:
        found = self.scheduler_adapter._finished_lookup_results.get(request)
        return found if isinstance(found, int) else None

    def due(self, metadata: Any) -> list[tuple[str, int, int]]:
        """(request, first token, end) of each load that the metadata tell the worker to start."""
        return [
            (meta.request_id, meta.op.start + getattr(meta.op, "skip_first_n_tokens", 0), meta.op.end)
            for meta in metadata.requests
            if meta.direction == "RETRIEVE"
        ]

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def finish_step(self, forward: bool, ended: set[str]) -> tuple[set[str] | None, set[str] | None, set[int]]:
        if forward:
            self.worker.wait_for_save()
        if self.deaf:
            self.server.lose_loads(set(self.worker_adapter.retrieve_futures))
            self.worker_adapter._health_event.clear()
        sending, receiving = self.worker.get_finished(ended)
        if self.deaf:
            self.worker_adapter._health_event.set()
            self.deaf = False
        failed = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        return sending, receiving, failed

    def failed_blocks(self) -> set[int]:
        return set()  # loads run between steps: who waits for one is in none

    def busy(self) -> bool:
        """Whether a transfer or lookup is under way."""
        return bool(self.server.busy)

    def loading(self) -> set[str]:
        return self.server.loading

    def state(self) -> dict[str, set[str]]:
        lookup = ["_pending_lookups", "_unacked_lookups", "_finished_lookup_results", "_per_server_hits"]
        lookup += ["_lookup_status", "_lookup_params"]
        worker = ["store_futures", "retrieve_futures", "finished_stores", "previously_finished"]
        return {
            "request_trackers": set(self.connector.request_trackers),
            **{f"scheduler_adapter.{name}": set(getattr(self.scheduler_adapter, name, ())) for name in lookup},
            **{f"worker_adapter.{name}": set(getattr(self.worker_adapter, name, ())) for name in worker},
            "read locks of the server": set(self.server.cache.pins),
        }
