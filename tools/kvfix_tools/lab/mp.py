"""LMCache's multi-process connectors in the lab: LMCache's own and vLLM's in-tree copy, both roles, without a server.

Real: the connector classes, their trackers and metadata, LMCache's scheduler and worker adapters with their futures.
Replaced: the client that speaks to the server, and the transfer context, which copies between slots and chunks
(mp_server.py, which answers after as many steps as the options say).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvfix.connector_events import readers
from kvfix_tools.lab import vllm_objects
from kvfix_tools.lab.connector import Connector
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.mp_server import Heartbeat, Server
from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix_tools.lab.request_events import RequestEvents

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"


def _without_gpu() -> None:
    """vLLM's copy records a CUDA event to order the transfer after the step; here each step is done when it returns."""
    if torch.cuda.is_available():
        return
    event = SimpleNamespace(record=lambda *_: None, ipc_handle=lambda: b"")
    cuda: Any = torch.cuda
    cuda.Event = lambda **_: event
    cuda.current_stream = lambda: None
    cuda.stream = lambda *_: nullcontext()


class MessageQueue:
    """The server behind the message queue of the releases before 0.5.6: requests by type, payloads in a list.

    Before 0.4.6 it takes the transfers too: (key, worker, blocks, event), and how many tokens not to write.
    """

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

    def close(self) -> None:
        """The lab's server ends with its engine."""


class MP(Connector):
    """Both roles, joined by the lab's server."""

    def __init__(self, options: Options, slots: Slots, cache: Cache) -> None:
        self.server = Server(slots, cache, options)
        self.failing = self.server.failing
        adapter: Any = import_module(ADAPTER)
        if hasattr(adapter, "RequestClientFactory"):
            adapter.RequestClientFactory = SimpleNamespace(create=lambda url, context=None: self.server)
        else:
            adapter.MessageQueueClient = lambda url, context: MessageQueue(self.server)
        adapter.HeartbeatThread = functools.partial(Heartbeat, self.server)  # no threads
        adapter.create_transfer_context = lambda *_, **__: self.server
        adapter.vllm_layout_hints = dict  # it asks the model
        _without_gpu()
        #: In this step the worker gets no answer from the server.
        self.unanswered = False
        config = vllm_objects.vllm_config(options)
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self.scheduler.connector
        self.in_worker = vllm_objects.worker(options, config)
        self.reader = readers.MP(self.in_scheduler)
        self.scheduler_adapter = self.in_scheduler.scheduler_adapter
        self.worker_adapter = self.in_worker.worker_adapter
        self.worker_adapter.register_kv_caches({})
        if hasattr(self.worker_adapter, "_block_ids_per_group"):
            several = bool(options.windows)
            self.worker_adapter._block_ids_per_group = lambda op: op.block_ids if several else [op.flat_block_ids]
        #: With several KV groups vLLM wants failed loads by request, from releases of LMCache that know them.
        self._by_request = bool(options.windows) and hasattr(self.in_worker, "get_transfer_results")
        self._failed_requests: set[str] = set()

    def listen(self, events: RequestEvents) -> None:
        self.events = self.server.events = events

    def stored_elsewhere(self, prompt: list[int]) -> None:
        """A step: another instance has stored this prompt in the cache, whole chunks of it."""
        self.server.chunks.put(prompt)

    def not_stored(self, request: Any) -> list[int]:
        """First tokens of the whole chunks of this request's prompt that are not in the cache."""
        chunks = self.server.chunks
        keys, _ = chunks.keys(request.prompt_token_ids, request.num_prompt_tokens, request.cache_salt or "")
        return [number * chunks.size for number, key in enumerate(keys) if key not in chunks.cache]

    def lookup_times_out(self) -> None:
        """A step: a lookup was not answered in time, and the scheduler's adapter takes the server for dead."""
        adapter = self.scheduler_adapter
        for event in getattr(adapter, "_health_events", {"": getattr(adapter, "_health_event", None)}).values():
            event.clear()

    def lookups_fail(self, how_many: int) -> None:
        """A step: so many of the next lookups time out, which is answered as no hit."""
        self.server.unanswered = how_many

    def hour_of_silence(self) -> None:
        """A step: nothing is asked for an hour, and the server forgets a worker that has never pinged."""
        self.server.forget_silent_worker()

    # ------------------------------------------------------------------ a step

    def tick(self) -> None:
        self.server.tick()

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.in_worker.handle_preemptions(metadata)
        super().start_step(metadata, forward)

    def get_finished(self, ended: set[str]) -> Any:
        if not self.unanswered:
            return self._get_finished(ended)
        self.unanswered = False
        self.server.lose_loads(set(self.worker_adapter.retrieve_futures))
        self.worker_adapter._health_event.clear()
        finished = self._get_finished(ended)
        self.worker_adapter._health_event.set()
        return finished

    def _get_finished(self, ended: set[str]) -> Any:
        if not self._by_request:
            return self.in_worker.get_finished(ended)
        results = self.in_worker.get_transfer_results(ended)
        self._failed_requests = results.failed_recving
        return results.finished_sending, results.finished_recving

    def failed_requests(self) -> dict[str, set[str]]:
        return {"failed_recving": self._failed_requests} if self._by_request else {}

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> Any:
        finished = super().finish_step(forward, ended, save_last)
        self.in_worker.clear_connector_metadata()
        return finished

    # ------------------------------------------------------------------ what is in flight, and what is kept

    def busy(self) -> bool:
        return bool(self.server.busy)

    def loading(self) -> set[str]:
        return self.server.loading

    def in_flight(self, request: str) -> set[str]:
        doing = {"looking": self.server.is_looking(request), "loading": request in self.server.loading}
        doing["storing"] = self.server.storing[request] > 0
        return {name for name, yes in doing.items() if yes}

    def kept(self) -> dict[str, set[str]]:
        """With lookups that were not answered, which an engine's connector may keep for a while."""
        lookups = {
            f"scheduler_adapter.{name}": set(getattr(self.scheduler_adapter, name, ()))
            for name in ("_pending_lookups", "_unacked_lookups")
        }
        in_worker = {where: set(names) for where, names in readers.MP(self.in_worker).kept()}
        return {
            **lookups,
            **super().kept(),
            **in_worker,
            "read locks of the server": set(self.server.chunks.cache.pins),
        }

    def kept_for_a_while(self) -> dict[str, set[str]]:
        """What is kept on purpose of requests that have ended, for a while."""
        return {"worker_adapter._returned_finished": set(self.worker_adapter._returned_finished)}
