"""LMCache's layerwise loads and stores in the lab (`use_layerwise`), with the real `retrieve_layer` and `store_layer`.

The lab replaces LMCache's storage and GPU connector. A chunk is stored when the chunk's last layer is saved. During a
load, a slot holds garbage until its last layer is loaded. A step of the lab loads all layers, computes, and then saves
all layers. A real engine loads, computes and saves layer by layer.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import KVConnectorOutput

from kvfix_tools.lab.connectors.connector import Nothing, nothing
from kvfix_tools.lab.connectors.v1 import V1, CacheEngine, V1Worker, tags_of
from kvfix_tools.lab.engine.memory import GARBAGE, Cache, Slots

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
_MODULE = "lmcache.v1.cache_engine"


class _Chunk:
    """Replaces LMCache's memory object for one layer of a chunk. v1.py manages the pins."""

    is_pinned = False

    def __init__(self, contents: Sequence[int] = ()) -> None:
        self.contents = list(contents)

    def get_size(self) -> int:
        return len(self.contents)

    def ref_count_down(self) -> None: ...


class _Storage:
    """Replaces the storage manager for one load or store. left: maximum number of chunks to find."""

    def __init__(self, cache: Cache, left: int = sys.maxsize) -> None:
        self._cache = cache
        self._left = left

    def contains(self, key: Any, *_: Any) -> str | None:
        self._left -= 1
        return "LocalCPUBackend" if self._left >= 0 and _key(key) in self._cache else None

    def layerwise_batched_get(self, keys: list[list[Any]], location: str | None = None) -> Iterator[Future[Any]]:
        for layer in keys:
            future: Future[Any] = Future()
            future.set_result([_Chunk(self._cache[_key(key)]) for key in layer])
            yield future

    def batched_allocate(self, *_: Any, batch_size: int, **__: Any) -> list[_Chunk]:
        return [_Chunk() for _ in range(batch_size)]

    def batched_put(self, keys: list[Any], chunks: list[_Chunk], **_: Any) -> None:
        for key, chunk in zip(keys, chunks, strict=True):
            if key.layer_id == len(LAYERS) - 1:
                self._cache[_key(key)] = chunk.contents


class _GPUConnector(NamedTuple):
    """Replaces LMCache's GPU connector. `retrieve_layer` and `store_layer` advance its generators once per layer."""

    slots: Slots

    def get_shape(self, tokens: int) -> torch.Size:
        return torch.Size([tokens])

    def batched_to_gpu(self, starts: list[int], ends: list[int], **more: Any) -> Iterator[None]:
        slot_mapping = more["slot_mapping"].tolist()
        for layer in range(len(LAYERS)):
            chunks: Any = yield
            for chunk, start, end in zip(chunks, starts, ends, strict=True):
                for slot, content in zip(slot_mapping[start:end], chunk.contents, strict=False):
                    self.slots.put(slot, content if layer == len(LAYERS) - 1 else GARBAGE)
        yield
        yield

    def batched_from_gpu(self, layers: list[Any], starts: list[int], ends: list[int], **more: Any) -> Iterator[None]:
        slot_mapping = more["slot_mapping"].tolist()
        for chunks in layers:
            for chunk, start, end in zip(chunks, starts, ends, strict=True):
                chunk.contents = [self.slots.get(slot) for slot in slot_mapping[start:end]]
            yield
        yield


def _key(key: Any) -> object:
    """Return the lab's key of a chunk. key: LMCache's key of the chunk in one layer."""
    return (key.chunk_hash, *tags_of(key.request_configs))


class LayerwiseEngine(CacheEngine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        module: Any = importlib.import_module(_MODULE)
        module.assert_layerwise_gpu_connector = lambda connector: None
        self._real = module.LMCacheEngine
        #: The metadata of requests that this step still has to load.
        self._to_load: list[Any] = []

    def begin(self, metadata: Any) -> None:
        super().begin(metadata)
        loads = ((each, each.load_spec) for each in metadata.requests)
        self._to_load = [each for each, spec in loads if spec is not None and spec.can_load]

    def _as_real(self, storage: _Storage) -> Any:
        """Return an object with the attributes that `retrieve_layer` and `store_layer` read."""
        return SimpleNamespace(
            storage_manager=storage, gpu_connector=_GPUConnector(self.slots), token_database=self.tokens,
            num_layers=len(LAYERS), metadata=SimpleNamespace(kv_dtype=torch.float32), fmt=None, lookup_pins={},
            config=SimpleNamespace(get_extra_config_value=lambda name, default: default), stats_monitor=Nothing(),
            is_healthy=lambda: True, is_frozen=lambda: False, _is_passive=lambda: False,
            _get_req_id=lambda more: more.get("req_id", ""), _log_kvcache_for_check=nothing, retrieve_locations=None,
            store_location=None, kv_events_enabled=False, async_loading=False, remove_after_retrieve=False,
        )  # fmt: skip

    def retrieve_layer(self, tokens: Any, mask: Any = None, **more: Any) -> Iterator[Any]:
        """Load layer by layer. The first value that this generator yields is the number of loaded tokens, or None."""
        # the adapter does not pass the request id, but loads the requests of a step in order
        name = str(self._to_load.pop(0).req_id)
        real = self._as_real(_Storage(self.cache, self.failing.pop(name, sys.maxsize)))
        skipped = len(tokens) - int(mask.sum())
        for number, layer in enumerate(self._real.retrieve_layer(real, tokens, mask, **more)):
            if number == 0:
                moved = 0 if layer is None else int(layer)
                self.events.loaded(name, skipped + moved if moved else 0, moved, self.rank)
            yield layer

    def store_layer(self, tokens: Any, mask: Any = None, **more: Any) -> Iterator[None]:
        spans = [(start, end) for start, end, _ in self._keys(tokens, mask, more)]
        if spans:
            self.events.stored(self._name(more), list(tokens), spans[0][0], spans[-1][1], self.rank)
        yield from self._real.store_layer(self._as_real(_Storage(self.cache)), tokens, mask=mask, **more)


class LayerwiseWorker(V1Worker):
    def start_step(self, metadata: Any, forward: bool) -> None:
        super().start_step(metadata, forward)
        for name in LAYERS if forward else ():
            self.called.wait_for_layer_load(name)

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> KVConnectorOutput:
        for name in LAYERS if forward else ():
            self.called.save_kv_layer(name, torch.zeros(1), None)
        return super().finish_step(forward, ended, save_last)


class LayerwiseV1(V1):
    engine = LayerwiseEngine
    worker = LayerwiseWorker
    layers = LAYERS
