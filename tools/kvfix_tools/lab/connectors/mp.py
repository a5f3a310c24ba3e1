"""Play LMCache's multi-process connector, and vLLM's copy. The lab replaces LMCache's client and transfer context."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from kvfix.engine_state import lmcache_readers
from kvfix.ledger import events as ev
from kvfix_tools.lab import releases
from kvfix_tools.lab.connectors.connector import Connector, nothing
from kvfix_tools.lab.connectors.mp_server import Heartbeat, Server
from kvfix_tools.lab.engine import vllm_objects
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"


@functools.cache
def released() -> Any:
    """Return the original LMCache objects that the lab replaces in the adapter's module."""
    adapter = import_module(ADAPTER)
    names = "RequestClientFactory", "HeartbeatThread", "create_transfer_context"
    return SimpleNamespace(**{name: getattr(adapter, name, None) for name in names})


class MessageQueue:
    """Replaces LMCache's MessageQueueClient (before 0.5.5). Before 0.4.6, this client also sends stores and loads."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def submit_request(self, request_type: Any, payloads: list[Any], response_class: Any = None) -> Any:
        name = request_type.name.lower()
        return getattr(self if hasattr(self, name) else self._server, name)(*payloads)

    def register_kv_cache(self, *_: Any) -> Any:
        return self._server.register()

    def store(self, key: Any, worker: int, blocks: list[int], event: bytes) -> Any:
        return self._server.submit_store(key.request_id, key, blocks)

    def retrieve(self, key: Any, worker: int, blocks: list[int], event: bytes, skip: int) -> Any:
        return self._server.submit_retrieve(key.request_id, key, blocks, skip_first_n_tokens=skip)

    close = nothing  # the lab's server ends with its engine


class MPWorker(Worker):
    clears = True

    def __init__(self, rank: int, server: Server, slots: Slots, called: Any, in_worker: Any, options: Options) -> None:
        super().__init__(rank, slots, called, in_worker, in_worker.worker_adapter, server.failing[rank])
        self._server = server
        self._register(options)
        #: True if the worker reports failed loads by request (`get_transfer_results`), as several KV groups need.
        self.by_request = options.several_groups and hasattr(in_worker, "get_transfer_results")

    def _register(self, options: Options) -> None:
        """Register the worker without KV memory, because the lab's server already has the memory."""
        self.adapter.register_kv_caches({})
        if hasattr(self.adapter, "_block_ids_per_group"):
            several = options.several_groups
            self.adapter._block_ids_per_group = lambda op: op.block_ids if several else [op.flat_block_ids]
        if options.several_groups:
            module: Any = import_module("lmcache.integration.vllm.kv_cache_groups")
            groups = self.in_worker._kv_cache_config.kv_cache_groups
            places = {name: at for at, name in enumerate(name for group in groups for name in group.layer_names)}
            sizes = module._resolve_per_layer_sw_sizes(groups, places, len(places))
            self._server.chunks.keep([size for size in sizes if size > 0])  # full attention has the size -1

    def get_finished(self, ended: set[str]) -> Any:
        if not self.unanswered:
            return self._get_finished(ended)
        self.unanswered = False
        self._server.lose_loads(self.rank, set(self.adapter.retrieve_futures))
        self.adapter._health_event.clear()
        with self._server.disconnected(getattr(self.adapter, "req_client", None)):
            finished = self._get_finished(ended)
        self.adapter._health_event.set()
        return finished

    def _get_finished(self, ended: set[str]) -> Any:
        loads = self._unanswered_loads()
        finished = super().get_finished(ended)
        if self._server.down:
            self._server.give_up(self.rank, loads - self._unanswered_loads())
        return finished

    def _unanswered_loads(self) -> set[str]:
        """Return the requests whose load the server has not answered and the worker has not reported as failed."""
        if not self._server.down:
            return set()
        loads = {name for name, (future, _) in self.adapter.retrieve_futures.items() if not future.query()}
        return loads.union(getattr(self.adapter, "_dropped_retrieves", ()))


class MP(Connector):
    workers: list[MPWorker]
    _worker_class = MPWorker
    _server_class = Server

    def __init__(self, options: Options, memories: Sequence[Slots], caches: Sequence[Cache]) -> None:
        self.server = self._server_class(memories, caches[0], options)
        adapter: Any = import_module(ADAPTER)
        released()
        self._replace(adapter)
        adapter.vllm_layout_hints = dict  # the real function needs the model
        # vLLM's copy of the connector uses CUDA events. The fakes do nothing, because the lab copies KV at once.
        if not torch.cuda.is_available():
            event = SimpleNamespace(record=nothing, ipc_handle=lambda: b"")
            fakes = {"Event": lambda **_: event, "current_stream": nothing, "stream": lambda *_: nullcontext()}
            vars(torch.cuda).update(fakes)
        config = vllm_objects.vllm_config(options)
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self._of_lmcache(options, self.scheduler.connector)
        self.workers = [self._make_worker(rank, slots, options, config) for rank, slots in enumerate(memories)]
        self._join_others(options)
        self.reader = lmcache_readers.MP(self.in_scheduler)
        self.scheduler_adapter = self.in_scheduler.scheduler_adapter

    def _replace(self, adapter: Any) -> None:
        if hasattr(adapter, "RequestClientFactory"):
            adapter.RequestClientFactory = SimpleNamespace(create=lambda url, context=None: self.server)
        else:
            adapter.MessageQueueClient = lambda url, context: MessageQueue(self.server)
        adapter.HeartbeatThread = functools.partial(Heartbeat, self.server)  # a Heartbeat has no thread
        adapter.create_transfer_context = lambda *_, **__: self.server

    def _make_worker(self, rank: int, slots: Slots, options: Options, config: Any) -> MPWorker:
        called = vllm_objects.worker(options, vllm_objects.of_rank(config, rank))
        return self._worker_class(rank, self.server, slots, called, self._of_lmcache(options, called), options)

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        self.server.events = events

    def stored_elsewhere(self, prompt: list[int]) -> None:
        """Store the whole chunks of this prompt, as if another instance had stored them."""
        self.server.chunks.put(prompt)

    def not_stored(self, request: Any) -> list[int]:
        """Return the index of the first token of each whole chunk of the prompt that the cache lacks."""
        chunks = self.server.chunks
        keys, _ = chunks.keys(request.prompt_token_ids, request.num_prompt_tokens, request.cache_salt or "")
        return [number * chunks.size for number, key in enumerate(keys) if key not in chunks.cache]

    def lookup_times_out(self) -> None:
        """Make the scheduler's adapter treat the server as dead, as a lookup timeout does."""
        adapter = self.scheduler_adapter
        for event in getattr(adapter, "_health_events", {"": getattr(adapter, "_health_event", None)}).values():
            event.clear()

    def lookups_fail(self, how_many: int) -> None:
        """Let the next `how_many` lookups time out. The connector then reports no hit."""
        self.server.unanswered = how_many

    def server_stops(self) -> None:
        """Stop the server. Until `server_goes_on`, heartbeats get no answer, and lookups, loads and stores wait."""
        self.server.events.counts["server_stops"] += not self.server.down
        self.server.down = True

    def server_goes_on(self) -> None:
        """Start the server again. The server then runs the lookups, loads and stores that have waited."""
        self.server.down = False

    def hour_of_silence(self) -> None:
        """Let an hour without requests pass. Servers of some releases forget a worker that has sent no ping."""
        pinged = any(heartbeat.is_of_worker for heartbeat in self.server.heartbeats)
        self.server.registered = pinged or bool(releases.missing(releases.FORGETS))

    def tick(self) -> None:
        super().tick()
        self.server.tick()
        if self.server.down:
            self.server.events.met_silence.update(self.scheduler.requests)

    def busy(self) -> bool:
        return super().busy() or bool(self.server.busy)

    def loading(self) -> set[str]:
        return super().loading().union(self.server.loading)

    def storing(self) -> set[str]:
        return super().storing().union(+self.server.storing)

    def is_looking(self, request: str) -> bool:
        return self.server.is_looking(request)

    def kept(self) -> dict[str, set[str]]:
        """Also return unanswered lookups, which `self.reader` omits because an engine may keep a lookup for a while."""
        lookups = {
            f"scheduler_adapter.{name}": set(getattr(self.scheduler_adapter, name, ()))
            for name in ("_pending_lookups", "_unacked_lookups")
        }
        in_workers: dict[str, set[str]] = {}
        for worker in self.workers:
            for where, names in lmcache_readers.MP(worker.in_worker).kept():
                in_workers.setdefault(where, set()).update(names)
        return {
            **lookups,
            **super().kept(),
            **in_workers,
            "read locks of the server": set(self.server.chunks.cache.pins) - self.server.events.met_silence,
        }

    def expect_forgotten(self, name: str) -> None:
        """Long after this request has ended, check that neither role nor the server holds state of the request."""
        returned = set().union(*(worker.adapter._returned_finished for worker in self.workers))
        for where, names in {**self.kept(), "worker_adapter._returned_finished": returned}.items():
            if name in names:
                self.events.add(ev.Left(name, where))
