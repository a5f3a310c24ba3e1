"""LMCache's in-process connector in the lab: the real adapter in both roles, over stand-ins for what needs a GPU.

Real: `LMCacheConnectorV1Impl`, scheduler and worker, its trackers and metadata, the lookup client with its cache of
results, LMCache's chunking and keys. Stand-ins (v1_stand_ins.py): the socket between lookup client and worker, and the
cache engine, which copies between the lab's slots and chunks instead of GPU and CPU memory.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvfix.connector_events import readers
from kvfix_tools.lab.connector import Connector
from kvfix_tools.lab.memory import Cache, Prefix, Slots
from kvfix_tools.lab.v1_stand_ins import CacheEngine, LookupSocket

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.request_events import RequestEvents

ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
#: What the worker's adapter has of the scheduler's.
_SHARED = ["kv_role", "config", "async_loading", "_block_size", "_lmcache_chunk_size", "_stats_monitor", "_vllm_config"]


class V1(Connector):
    """Both roles, joined by the lab's memory."""

    def __init__(self, scheduler: Scheduler, connector: Any, slots: Slots, cache: Cache) -> None:
        self.scheduler = scheduler
        self.in_scheduler = connector
        self.scheduler_adapter = connector._lmcache_engine
        self.cache_engine = self._join(self.scheduler_adapter.lookup_client, slots, cache)
        self.worker_adapter = self._make_worker_adapter()
        self.in_worker = self._connector_over(self.worker_adapter)
        self.reader = readers.V1(connector)

    def _join(self, client: Any, slots: Slots, cache: Cache) -> CacheEngine:
        """The worker's cache, answering the scheduler's lookup client."""
        cache_engine = CacheEngine(slots, cache, client.token_database)
        owner = getattr(client, "transport", client)
        self.socket = LookupSocket(cache_engine.lookup, packed=owner is not client)
        owner.sockets = [self.socket]
        owner._recreate_socket = owner._recreate_all_sockets = lambda *_: None
        return cache_engine

    def _make_worker_adapter(self) -> Any:
        """The adapter in the worker's role. Its `__init__` would start servers and ask for a GPU connector."""
        kind: Any = type(self.scheduler_adapter)
        module = sys.modules[kind.__module__]
        if not torch.cuda.is_available():  # 0.3.9 moves its slot mappings without asking
            torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        if hasattr(module, "get_pp_group"):
            module.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)  # type: ignore[attr-defined]
        adapter = kind.__new__(kind)
        vars(adapter).update({name: getattr(self.scheduler_adapter, name) for name in _SHARED})
        vars(adapter).update(
            _invalid_block_ids=set(),
            device=torch.device("cpu"),
            use_layerwise=False,
            enable_blending=False,
            current_layer=0,
            num_layers=1,
            layerwise_retrievers=[],
            _layerwise_save_storers={},
            kv_caches={"layer": torch.zeros(1)},
        )
        if isinstance(getattr(kind, "lmcache_engine", None), property):
            adapter._manager = SimpleNamespace(lmcache_engine=self.cache_engine, lookup_client=None)
        else:
            adapter.lmcache_engine = self.cache_engine
        return adapter

    def _connector_over(self, adapter: Any) -> Any:
        """The connector in the worker's role, as vLLM calls it: it hands on to the adapter."""
        kind: Any = type(self.in_scheduler)
        connector = kind.__new__(kind)
        vars(connector).update(_lmcache_engine=adapter, _role=KVConnectorRole.WORKER, _connector_metadata=None)
        adapter._parent = connector
        return connector

    def listen(self, events: RequestEvents) -> None:
        self.events = self.cache_engine.events = self.socket.events = events

    def put(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt, whole chunks of it."""
        contents, size = Prefix().of(prompt), self.scheduler_adapter._lmcache_chunk_size
        for start, end, key in self.cache_engine.tokens.process_tokens(prompt, make_key=False):
            if end - start == size:
                self.cache_engine.cache.put((key,), contents[start:end])

    def fail_load(self, request: str, after_chunks: int) -> None:
        self.cache_engine.failing[request] = after_chunks

    def lookups_fail(self, how_many: int) -> None:
        self.socket.fails = how_many

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.cache_engine.begin(metadata)
        super().start_step(metadata, forward)

    def failed_blocks(self) -> set[int]:
        return set(self.worker_adapter._invalid_block_ids)

    def kept(self) -> dict[str, set[str]]:
        return {**super().kept(), readers.PINS: set(self.cache_engine.cache.pins)}
