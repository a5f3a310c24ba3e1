"""LMCache's multi-process connectors in the lab: LMCache's own and vLLM's in-tree copy, both roles, without a server.

Real: the connector classes, their trackers and metadata, LMCache's scheduler and worker adapters with their futures.
Stand-ins: the client that speaks to the server (a server of the lab answers, after as many steps as the options say),
and the transfer context, which copies between the lab's slots and chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvfix.probes import readers
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.mp_server import Heartbeat, Server
from kvfix_tools.lab.mp_transfer import Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


class Queue:
    """The server behind the message queue of the releases before 0.5.6: requests by type, payloads in a list.

    Before 0.4.6 it takes the transfers too: (key, worker, blocks, event), and how many tokens not to write.
    """

    def __init__(self, server: Server, transfer: Transfer) -> None:
        self._server = server
        self._transfer = transfer

    def submit_request(self, request_type: Any, payloads: list[Any], response_class: Any = None) -> Any:
        name = request_type.name.lower()
        whose = self if hasattr(self, name) else self._server
        return getattr(whose, name)(*payloads)

    def register_kv_cache(self, *_: Any) -> Any:
        self._transfer.register()
        return self._server.answer(None)

    def store(self, key: Any, worker: int, blocks: list[int], event: bytes) -> Any:
        return self._transfer.submit_store(key.request_id, key, blocks)

    def retrieve(self, key: Any, worker: int, blocks: list[int], event: bytes, skip: int) -> Any:
        return self._transfer.submit_retrieve(key.request_id, key, blocks, skip_first_n_tokens=skip)

    def close(self) -> None:
        """The lab's server ends with its world."""


class MP:
    """Both sides of the connector, joined by the lab's server."""

    def __init__(self, make: Callable[[str], Any], config: VllmConfig, slots: Slots, cache: Cache, delay: int) -> None:
        chunk = config.kv_transfer_config.get_from_extra_config("lmcache.chunk_size", 0)
        self.server = Server(cache, chunk, delay)
        self.transfer = Transfer(self.server, slots)
        adapter: Any = import_module(ADAPTER)
        if hasattr(adapter, "RequestClientFactory"):
            adapter.RequestClientFactory = SimpleNamespace(create=lambda url, context=None: self.server)
        else:
            adapter.MessageQueueClient = lambda url, context: Queue(self.server, self.transfer)
        adapter.HeartbeatThread = functools.partial(Heartbeat, self.server)  # no threads
        adapter.create_transfer_context = lambda *_, **__: self.transfer
        adapter.vllm_layout_hints = dict  # it asks the model
        _without_gpu()
        #: In this step the worker hears nothing from the server.
        self.deaf = False
        self.connector = make("scheduler")
        self.worker = make("worker")
        self.reader = readers.MP(self.connector)
        self.scheduler_adapter = self.connector.scheduler_adapter
        self.worker_adapter = self.worker.worker_adapter
        self.worker_adapter.register_kv_caches({})
        if hasattr(self.worker_adapter, "_block_ids_per_group"):
            self.worker_adapter._block_ids_per_group = lambda op: [op.flat_block_ids]

    def listen(self, on_load: Any, on_store: Any, on_wrong: Any, right: Any, on_timeout: Any, lost: Any) -> None:
        self.transfer.on_load, self.transfer.on_store, self.transfer.on_wrong = on_load, on_store, on_wrong
        self.transfer.right, self.server.on_lost = right, lost

    def tick(self) -> None:
        self.server.tick()

    def put(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt."""
        keys, contents = self.server.keys(prompt, len(prompt), "")
        size = self.server.chunk_size
        for number, key in enumerate(keys):
            self.server.cache.put(key, contents[number * size : (number + 1) * size])

    def fail_load(self, request: str, after_chunks: int) -> None:
        self.transfer.failing[request] = after_chunks

    def lose_loads(self) -> None:
        self.deaf = True

    def lookup_times_out(self) -> None:
        adapter = self.scheduler_adapter
        for event in getattr(adapter, "_health_events", {"": getattr(adapter, "_health_event", None)}).values():
            event.clear()

    def lookups_fail(self, how_many: int) -> None:
        self.server.unanswered = how_many

    def hit(self, request: str) -> int | None:
        return self.reader.hit(request)

    def due(self, metadata: Any) -> list[tuple[str, int, int]]:
        """(request, first token, end) of each load that the metadata tell the worker to start."""
        return self.reader.loads(metadata) or []

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def finish_step(
        self, forward: bool, ended: set[str], save_last: bool
    ) -> tuple[set[str] | None, set[str] | None, set[int]]:
        if forward and not save_last:
            self.worker.wait_for_save()
        if self.deaf:
            self.transfer.lose_loads(set(self.worker_adapter.retrieve_futures))
            self.worker_adapter._health_event.clear()
        sending, receiving = self.worker.get_finished(ended)
        if self.deaf:
            self.worker_adapter._health_event.set()
            self.deaf = False
        failed = self.worker.get_block_ids_with_load_errors()
        if forward and save_last:
            self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        return sending, receiving, failed

    def failed_blocks(self) -> set[int]:
        return set()  # loads run between steps: who waits for one is in none

    def busy(self) -> bool:
        """Whether a transfer or lookup is under way."""
        return bool(self.server.busy)

    def loading(self) -> set[str]:
        return self.transfer.loading

    def under_way(self, request: str) -> set[str]:
        """What is done for this request beside the steps."""
        doing = {"looking": self.server.is_looking(request), "loading": request in self.transfer.loading}
        doing["storing"] = self.transfer.storing[request] > 0
        return {name for name, yes in doing.items() if yes}

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

    def remembered(self) -> dict[str, set[str]]:
        """What is kept on purpose of requests that have ended, for a while."""
        return {"worker_adapter._returned_finished": set(self.worker_adapter._returned_finished)}
