"""LMCache's in-process connector in the lab: the real adapter in both roles, over stand-ins for what needs a GPU.

Real: `LMCacheConnectorV1Impl`, scheduler and worker side, its trackers and metadata, the lookup client with its cache
of results, LMCache's chunking and keys. Stand-ins: the wire between lookup client and worker, and the cache engine,
which copies between the lab's slots and chunks instead of GPU and CPU memory.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvfix.probes import readers
from kvfix_tools.lab.memory import Cache, Prefix, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig

ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"


def forget_configuration() -> None:
    """LMCache keeps one configuration per process; the next connector is to read its own."""
    for name in ("lmcache.integration.vllm.utils", ADAPTER):
        if name in sys.modules and hasattr(sys.modules[name], "_config_instance"):
            sys.modules[name]._config_instance = None  # type: ignore[attr-defined]


class Wire:
    """In place of the socket between lookup client and worker: the worker's answer, at once.

    `fails`: how many of the next questions time out. Real is what stands on the socket: the client's own code (to
    0.3.15), LMCache's transport (since 0.4.1).
    """

    def __init__(self, lookup: Callable[[list[Any], list[int], str, str], int], packed: bool) -> None:
        self._lookup = lookup
        #: Whether every part of a question is packed, or hashes and offsets only.
        self._packed = packed
        self._question: list[Any] = []
        self.fails = 0
        #: Told of each question that times out, by the request that it is about.
        self.on_timeout: Callable[[str], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None

    def send_multipart(self, parts: list[bytes], copy: bool = True) -> None:
        unpack = msgspec.msgpack.decode
        texts = [unpack(part) if self._packed else part.decode() for part in parts[2:]]
        self._question = [unpack(parts[0]), unpack(parts[1]), *texts]

    def recv(self) -> bytes:
        if self.fails > 0:
            self.fails -= 1
            self.on_lost()
            self.on_timeout(self._question[2])
            raise zmq.Again
        return self._lookup(*self._question).to_bytes(4, "big")

    def close(self, linger: int = 0) -> None:
        """As a socket's."""


class CacheEngine:
    """In place of `LMCacheEngine`: the calls that the adapter makes of it, on the lab's memory."""

    storage_manager = None
    gpu_connector = None

    def __init__(self, slots: Slots, cache: Cache, tokens: Any) -> None:
        self.slots = slots
        self.cache = cache
        self.tokens = tokens
        self.lookup_pins: dict[str, Any] = cache.pins
        #: Set by the world: told of each load and store, (request, first token, end, tokens that were moved).
        self.on_load: Callable[[str, int, int, int], None] = lambda *_: None
        self.on_store: Callable[[str, list[int], int, int], None] = lambda *_: None
        #: The connector's metadata of the step that runs.
        self.metadata: Any = None
        #: request -> loads that fail after so many chunks
        self.failing: dict[str, int] = {}
        #: Requests whose store in this step was named by its slots.
        self._named: set[str] = set()

    def is_healthy(self) -> bool:
        return True

    def post_init(self, **more: Any) -> None:
        """The real one looks at the KV tensors here."""

    def lookup(self, hashes: list[Any], offsets: list[int], lookup_id: str, configs: str = "") -> int:
        """Tokens found, pinned for this lookup (LMCacheEngine.lookup with pin=True)."""
        tags = tags_of(json.loads(configs) if configs else None)
        return sum(offsets[: self.cache.pinned_prefix([(key, *tags) for key in hashes], lookup_id)])

    def lookup_unpin(self, lookup_ids: str | list[str]) -> None:
        for lookup_id in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            self.cache.unpin(lookup_id)

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        """Chunks from the cache into slots, up to the first that is not there. Which tokens were moved, as a mask."""
        slot_mapping, name = more["slot_mapping"].tolist(), str(more["req_id"])
        moved = torch.zeros(len(tokens), dtype=torch.bool)
        chunks_left = self.failing.pop(name, sys.maxsize)
        first, last = None, 0
        for start, end, key in self.keys(tokens, mask, more):
            contents = self.chunk(name, key)
            if contents is None or chunks_left == 0 or end > len(slot_mapping):
                break
            chunks_left -= 1
            for slot, content in zip(slot_mapping[start:end], contents, strict=True):
                self.slots.put(slot, content)
            moved[start:end] = True
            first, last = start if first is None else first, end
        self.on_load(name, first or 0, last, int(moved.sum()))
        return moved

    def keys(self, tokens: Any, mask: Any, call: dict[str, Any]) -> Iterator[tuple[int, int, object]]:
        """(first token, end, key) of each chunk: LMCache's own hash, and the tags that it puts into its keys."""
        tags = tags_of(call.get("request_configs"))
        for start, end, key in self.tokens.process_tokens(tokens, mask=mask, make_key=False):
            yield start, end, (key, *tags)

    def chunk(self, name: str, key: object) -> list[int] | None:
        """What a load of this request finds under the key."""
        return self.cache.get(key)

    def store(self, tokens: Any, mask: Any = None, **more: Any) -> None:
        """Slots into the cache, chunk by chunk; what is there already is left."""
        slot_mapping, name = more["slot_mapping"].tolist(), self._name(more)
        first, last = None, 0
        for start, end, key in self.keys(tokens, mask, more):
            first, last = start if first is None else first, end
            if key not in self.cache:
                self.cache.put(key, [self.slots.get(slot) for slot in slot_mapping[start:end]])
        if first is not None:
            self.on_store(name, list(tokens), first, last)

    def begin(self, metadata: Any) -> None:
        """A step begins, of which the scheduler's side says this."""
        self.metadata = metadata
        self._named.clear()

    def _name(self, call: dict[str, Any]) -> str:
        """The request that a store is for. Early releases do not say; its slots do, which it may share with others."""
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
    """What of a request's configuration is part of a key (CacheEngineKey, lmcache/utils.py)."""
    return sorted(item for item in (configs or {}).items() if item[0].startswith("lmcache.tag."))


class V1:
    """Both sides of the connector, joined by the lab's memory."""

    def __init__(self, connector: Any, config: VllmConfig, slots: Slots, cache: Cache) -> None:
        self.connector = connector
        self.scheduler_side = connector._lmcache_engine
        self.engine = self._join(self.scheduler_side.lookup_client, slots, cache)
        self.worker_side = self._worker(config)
        self.worker = self._hooks_of(self.worker_side)
        self.reader = readers.V1(connector)

    def _join(self, client: Any, slots: Slots, cache: Cache) -> CacheEngine:
        """The worker's cache, answering the scheduler's lookup client."""
        engine = CacheEngine(slots, cache, client.token_database)
        ends = getattr(client, "transport", client)
        self.wire = Wire(engine.lookup, packed=ends is not client)
        ends.sockets = [self.wire]
        ends._recreate_socket = ends._recreate_all_sockets = lambda *_: None
        return engine

    def _worker(self, config: VllmConfig) -> Any:
        """The adapter in the worker's role. Its `__init__` would start servers and ask for a GPU connector."""
        scheduler_side = self.scheduler_side
        kind: Any = type(scheduler_side)
        adapter = sys.modules[kind.__module__]
        if not torch.cuda.is_available():  # 0.3.9 moves its slot mappings without asking
            torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        if hasattr(adapter, "get_pp_group"):
            adapter.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)  # type: ignore[attr-defined]
        worker = kind.__new__(kind)
        shared = (
            "kv_role",
            "config",
            "async_loading",
            "_block_size",
            "_lmcache_chunk_size",
            "_stats_monitor",
            "_vllm_config",
        )
        for name in shared:
            setattr(worker, name, getattr(scheduler_side, name))
        worker._invalid_block_ids = set()
        worker.device = torch.device("cpu")
        worker.use_layerwise = worker.enable_blending = False
        worker.current_layer, worker.num_layers, worker.layerwise_retrievers = 0, 1, []
        worker._layerwise_save_storers = {}
        worker.kv_caches = {"layer": torch.zeros(1)}
        if isinstance(getattr(kind, "lmcache_engine", None), property):
            worker._manager = SimpleNamespace(lmcache_engine=self.engine, lookup_client=None)
        else:
            worker.lmcache_engine = self.engine
        return worker

    def _hooks_of(self, worker: Any) -> Any:
        """The connector in the worker's role, as vLLM calls it: it hands on to the adapter."""
        kind: Any = type(self.connector)
        connector = kind.__new__(kind)
        vars(connector).update(_lmcache_engine=worker, _role=KVConnectorRole.WORKER, _connector_metadata=None)
        worker._parent = connector
        return connector

    def listen(self, on_load: Any, on_store: Any, on_wrong: Any, right: Any, on_timeout: Any, lost: Any) -> None:
        self.engine.on_load, self.engine.on_store = on_load, on_store
        self.wire.on_timeout, self.wire.on_lost = on_timeout, lost

    def tick(self) -> None:
        """Everything is done within the step."""

    def put(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt, whole chunks of it."""
        contents, size = Prefix().of(prompt), self.scheduler_side._lmcache_chunk_size
        for start, end, key in self.engine.tokens.process_tokens(prompt, make_key=False):
            if end - start == size:
                self.engine.cache.put((key,), contents[start:end])

    def fail_load(self, request: str, after_chunks: int) -> None:
        self.engine.failing[request] = after_chunks

    def lookups_fail(self, how_many: int) -> None:
        self.wire.fails = how_many

    def busy(self) -> bool:
        return False

    def loading(self) -> set[str]:
        return set()

    def under_way(self, request: str) -> set[str]:
        """What is done for this request beside the steps: looking, loading, storing."""
        return set()

    def due(self, metadata: Any) -> list[tuple[str, int, int]]:
        """(request, first token, end) of each load that the metadata tell the worker to start."""
        return self.reader.loads(metadata) or []

    def hit(self, request: str) -> int | None:
        """Tokens that the last lookup of this request found, as long as the lookup client keeps it."""
        return self.reader.hit(request)

    def start_step(self, metadata: Any, forward: bool) -> None:
        """What vLLM's worker calls before the forward pass."""
        self.engine.begin(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def finish_step(
        self, forward: bool, ended: set[str], save_last: bool
    ) -> tuple[set[str] | None, set[str] | None, set[int]]:
        """What it calls after: (finished sending, finished receiving, blocks that failed to load)."""
        if forward and not save_last:
            self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(ended)
        failed = self.worker.get_block_ids_with_load_errors()
        if forward and save_last:
            self.worker.wait_for_save()
        return sending, receiving, failed

    def failed_blocks(self) -> set[int]:
        return set(self.worker_side._invalid_block_ids)

    def state(self) -> dict[str, set[str]]:
        """Where the connector keeps state by request id."""
        side = self.scheduler_side
        kept = {
            name: set(getattr(side, name))
            for name in ("load_specs", "_request_trackers", "_unfinished_requests", "_requests_priority")
            if hasattr(side, name)
        }
        return {
            **kept,
            "lookup_client.reqs_status": set(getattr(side.lookup_client, "reqs_status", ())),
            "pins of the worker": set(self.engine.cache.pins),
        }
