"""LMCache's in-process connector with its real adapter. The lab replaces the lookup socket and the cache engine."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvfix.engine_state import lmcache_readers
from kvfix.engine_state.reader import PINS
from kvfix_tools.lab.connectors.connector import Connector
from kvfix_tools.lab.engine import vllm_objects
from kvfix_tools.lab.engine.memory import Cache, Prefix, Slots, of_rank
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options

ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
#: Attributes that the worker's adapter gets from the scheduler's adapter.
_SHARED = ["kv_role", "config", "async_loading", "_block_size", "_lmcache_chunk_size", "_stats_monitor"]


class LookupSocket:
    """Replaces the socket between the lookup client and a worker. The worker answers at once.

    fails: how many of the next lookups time out. Up to LMCache 0.3.15, the lookup client itself has the sockets. Since
    0.4.1, the client's transport object has the sockets.
    """

    events: RequestEvents

    def __init__(self, lookup: Callable[[list[Any], list[int], str, str], int], packed: bool) -> None:
        self._lookup = lookup
        #: True if msgpack encodes all parts of a lookup message, False if msgpack encodes only hashes and offsets.
        self._packed = packed
        self._question: list[Any] = []
        self.fails = 0

    def send_multipart(self, parts: list[bytes], copy: bool = True) -> None:
        unpack = msgspec.msgpack.decode
        texts = [unpack(part) if self._packed else part.decode() for part in parts[2:]]
        self._question = [unpack(parts[0]), unpack(parts[1]), *texts]

    def recv(self) -> bytes:
        if self.fails > 0:
            self.fails -= 1
            self.events.counts["lookups_unanswered"] += 1
            self.events.lookup_timed_out(self._question[2])
            raise zmq.Again
        return self._lookup(*self._question).to_bytes(4, "big")

    def close(self, linger: int = 0) -> None: ...


class CacheEngine:
    """Replaces `LMCacheEngine` of one rank. Has the methods that the adapter calls, and uses the lab's memory."""

    storage_manager = None
    gpu_connector = None
    events: RequestEvents

    def __init__(self, rank: int, slots: Slots, cache: Cache, tokens: Any) -> None:
        self.rank = rank
        self.slots = slots
        self.cache = cache
        self.tokens = tokens
        self.lookup_pins: dict[str, Any] = cache.pins
        self.metadata: Any = None
        #: {request: number of chunks after which the next load fails}
        self.failing: dict[str, int] = {}
        #: Requests to which `_name` has already assigned a store of this step.
        self._named: set[str] = set()

    def is_healthy(self) -> bool:
        return True

    def post_init(self, **more: Any) -> None:
        """Do nothing. LMCache's engine reads the KV tensors in this method."""

    def lookup(self, hashes: list[Any], offsets: list[int], lookup_id: str, configs: str = "") -> int:
        """Pin the cached chunks and return the number of their tokens (LMCacheEngine.lookup with pin=True)."""
        tags = tags_of(json.loads(configs) if configs else None)
        found = sum(offsets[: self.cache.pinned_prefix([(key, *tags) for key in hashes], lookup_id)])
        self.events.found(lookup_id, found, self.rank)
        return found

    def lookup_unpin(self, lookup_ids: str | list[str]) -> None:
        for lookup_id in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            self.cache.unpin(lookup_id)

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        """Copy chunks into slots, up to the first missing chunk. Return a mask of the copied tokens."""
        slot_mapping, name = more["slot_mapping"].tolist(), str(more["req_id"])
        moved = torch.zeros(len(tokens), dtype=torch.bool)
        chunks_to_load = self.failing.pop(name, sys.maxsize)
        last = 0
        for start, end, key in self._keys(tokens, mask, more):
            contents = self.chunk(name, key)
            if contents is None or chunks_to_load == 0 or end > len(slot_mapping):
                break
            chunks_to_load -= 1
            for slot, content in zip(slot_mapping[start:end], contents, strict=True):
                self.slots.put(slot, content)
            moved[start:end] = True
            last = end
        self.events.loaded(name, last, int(moved.sum()), self.rank)
        return moved

    def chunk(self, name: str, key: object) -> list[int] | None:
        """Return the chunk that a load of this request finds under the key."""
        return self.cache.get(key)

    def store(self, tokens: Any, mask: Any = None, **more: Any) -> None:
        """Copy slots into the cache. Cached chunks do not change."""
        slot_mapping, name = more["slot_mapping"].tolist(), self._name(more)
        self.events.counts["stores_for_decoder"] += more.get("transfer_spec") is not None
        first, last = None, 0
        for start, end, key in self._keys(tokens, mask, more):
            first, last = start if first is None else first, end
            if key not in self.cache:
                self.cache[key] = [self.slots.get(slot) for slot in slot_mapping[start:end]]
        if first is not None:
            self.events.stored(name, list(tokens), first, last, self.rank)

    def begin(self, metadata: Any) -> None:
        self.metadata = metadata
        self._named.clear()

    def _keys(self, tokens: Any, mask: Any, call: dict[str, Any]) -> Iterator[tuple[int, int, object]]:
        """Yield (first token, end, key) of each chunk. The key has LMCache's own hash and the request's tags."""
        tags = tags_of(call.get("request_configs"))
        for start, end, key in self.tokens.process_tokens(tokens, mask=mask, make_key=False):
            yield start, end, (key, *tags)

    def _name(self, call: dict[str, Any]) -> str:
        """Return the request id of a store. If an old LMCache does not pass the id, find the request by its slots."""
        if call.get("req_id"):
            return str(call["req_id"])
        slots = call["slot_mapping"]
        for meta in self.metadata.requests:
            saves = meta.save_spec is None or meta.save_spec.can_save
            if saves and meta.req_id not in self._named and torch.equal(meta.slot_mapping[: len(slots)], slots):
                self._named.add(meta.req_id)
                return str(meta.req_id)
        raise LookupError("a store for no request of this step")


def tags_of(configs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the tags in a request's configuration. Cache keys contain the tags (CacheEngineKey, lmcache/utils.py)."""
    return sorted(item for item in (configs or {}).items() if item[0].startswith("lmcache.tag."))


class V1Worker(Worker):
    def __init__(self, cache_engine: CacheEngine, called: Any, in_worker: Any, adapter: Any) -> None:
        super().__init__(cache_engine.rank, cache_engine.slots, called, in_worker, adapter, cache_engine.failing)
        self.cache_engine = cache_engine

    def bind(self, metadata: Any) -> None:
        super().bind(metadata)
        self.cache_engine.begin(self.in_worker._get_connector_metadata())

    def failed_blocks(self) -> set[int]:
        return set(self.adapter._invalid_block_ids)


def adapter_in_worker(kind: Any, cache_engine: Any, layers: Sequence[str] = (), **shared: Any) -> Any:
    """Make a worker's adapter without `__init__`, which needs a GPU. layers: layer names. shared: other attributes."""
    module = sys.modules[kind.__module__]
    if not torch.cuda.is_available():  # LMCache 0.3.9 moves slot mappings to the GPU without a check
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    if hasattr(module, "get_pp_group"):
        vars(module)["get_pp_group"] = lambda: SimpleNamespace(is_last_rank=True)
    adapter = kind.__new__(kind)
    vars(adapter).update(
        device=torch.device("cpu"), use_layerwise=bool(layers), num_layers=len(layers) or 1, current_layer=0,
        kv_caches={name: torch.zeros(1) for name in layers or ("layer",)}, layerwise_retrievers=[],
        _layerwise_save_storers={}, _invalid_block_ids=set(), enable_blending=False, **shared,
    )  # fmt: skip
    if isinstance(getattr(kind, "lmcache_engine", None), property):
        adapter._manager = SimpleNamespace(lmcache_engine=cache_engine, lookup_client=None)
    else:
        adapter.lmcache_engine = cache_engine
    return adapter


class V1(Connector):
    engine: type[CacheEngine] = CacheEngine
    worker: type[V1Worker] = V1Worker
    #: Names of layers that are loaded and stored one by one.
    layers: Sequence[str] = ()

    def __init__(self, options: Options, memories: Sequence[Slots], caches: Sequence[Cache]) -> None:
        config = self.configured(options)
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self._of_lmcache(options, self.scheduler.connector)
        self._role = options.kv_role
        self.scheduler_adapter = self.in_scheduler._lmcache_engine
        module: Any = sys.modules[type(self.scheduler_adapter).__module__]
        module.tmp_disagg_tracker.clear()  # all engines of this process share the tracker
        client = self.scheduler_adapter.lookup_client
        ranks = enumerate(zip(memories, caches, strict=True))
        self.cache_engines = [self.engine(rank, *memory, client.token_database) for rank, memory in ranks]
        self._join(client)
        self.workers = [self._make_worker(each, vllm_objects.of_rank(config, each.rank)) for each in self.cache_engines]
        self._join_others(options)
        self.reader = lmcache_readers.V1(self.in_scheduler)

    def configured(self, options: Options) -> Any:
        return vllm_objects.vllm_config(options)

    def _join(self, client: Any) -> None:
        """Let the workers' cache engines answer the lookups of the scheduler's client."""
        owner = getattr(client, "transport", client)
        self.sockets = [LookupSocket(each.lookup, packed=owner is not client) for each in self.cache_engines]
        owner.sockets = list(self.sockets)
        owner._recreate_socket = owner._recreate_all_sockets = lambda *_: None

    def _make_worker(self, cache_engine: CacheEngine, config: Any) -> V1Worker:
        shared = {name: getattr(self.scheduler_adapter, name) for name in _SHARED}
        adapter = adapter_in_worker(type(self.scheduler_adapter), cache_engine, self.layers, **shared)
        kind: Any = type(self.in_scheduler)
        in_worker = kind.__new__(kind)
        vars(in_worker).update(_lmcache_engine=adapter, _connector_metadata=None, _role=KVConnectorRole.WORKER)
        vars(adapter).update(_parent=in_worker, _vllm_config=config)
        return self.worker(cache_engine, self._called(in_worker), in_worker, adapter)

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        for engine in self.cache_engines:
            engine.events = events
        for socket in self.sockets:
            socket.events = events

    def stored_elsewhere(self, prompt: list[int]) -> None:
        """Store the whole chunks of this prompt, as if another instance had stored them."""
        contents, size = Prefix().of(prompt), self.scheduler_adapter._lmcache_chunk_size
        for start, end, key in self.cache_engines[0].tokens.process_tokens(prompt, make_key=False):
            for each in self.cache_engines if end - start == size else ():
                each.cache[(key,)] = of_rank(each.rank, contents[start:end])

    def lookups_fail(self, how_many: int) -> None:
        """Let the next `how_many` lookups in the last rank time out."""
        self.sockets[-1].fails = how_many

    def not_to_store(self, request: Any) -> str:
        """Return why a request is not stored. `disagg_spec` overrides `skip_save` (0.5.6 vllm_v1_adapter.py:335)."""
        if self._role == "kv_consumer":
            return "this instance is a kv_consumer"
        asked = request.kv_transfer_params or {}
        return "it asks for lmcache.skip_save" if "lmcache.skip_save" in asked and "disagg_spec" not in asked else ""

    def kept(self) -> dict[str, set[str]]:
        return {**super().kept(), PINS: set().union(*(each.cache.pins for each in self.cache_engines))}
