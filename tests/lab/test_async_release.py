"""Test KVF013, KVF017, KVF018 and KVF026 with LMCache's cache engine on the CPU. The GPU connector copies nothing."""

import inspect
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.conftest import ADAPTER, RELEASES, Once, answers

TOKENS = list(range(64))


class Engine(NamedTuple):
    """LMCache's engine. mode: "layers" (layerwise loads), "async" (asynchronous loads), or "" for neither."""

    cache_engine: Any
    config: Any
    keys: Any
    mode: str

    def move(self, kind: str, name: str, skip: int = 0, **more: Any) -> Any:
        import torch

        mask = torch.ones(64, dtype=torch.bool)
        mask[:skip] = False
        move = getattr(self.cache_engine, f"{kind}_layer" if self.mode == "layers" else kind)
        return move(TOKENS, mask=mask, req_id=name, kvcaches=[], slot_mapping=torch.arange(64), **more)

    def store(self) -> None:
        deque(self.move("store", "first", offset=0) or ())

    def load(self, name: str, skip: int = 0) -> int:
        """Load, and return the number of loaded tokens. skip: number of tokens that vLLM already has."""
        loaded = self.move("retrieve", name, skip)
        return int((last(loaded) if self.mode == "layers" else loaded).sum())

    def look_up(self, name: str) -> None:
        assert self.cache_engine.lookup(TOKENS, lookup_id=name, pin=True) == 64

    def cached(self) -> list[Any]:
        return list(self.cache_engine.storage_manager.local_cpu_backend.hot_cache.values())

    def pins(self) -> list[int]:
        return [chunk.meta.pin_count for chunk in self.cached()]


def make_engine(mode: str, loading: Callable[[], None] = lambda: None) -> Engine:
    import torch
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    try:
        from lmcache.v1.metadata import LMCacheMetadata as Metadata
    except ImportError:
        from lmcache.config import LMCacheEngineMetadata as Metadata

    def forever(*_: Any, **__: Any) -> Iterator[None]:
        while True:
            yield

    def load(*_: Any, **__: Any) -> Iterator[None]:
        loading()
        return forever()

    connector = mock.Mock(batched_from_gpu=forever, batched_to_gpu=load)
    connector.get_shape = lambda tokens: torch.Size([2, 1, tokens, 8])
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=16, local_cpu=True, max_local_cpu_size=0.05, save_unfull_chunk=False, lmcache_instance_id="lab",
        enable_async_loading=mode == "async", use_layerwise=mode == "layers",
    )  # fmt: skip
    known = {
        "model_name": "m", "world_size": 1, "worker_id": 0, "fmt": "vllm", "kv_dtype": torch.float32,
        "kv_shape": (1, 2, 16, 1, 8), "use_mla": False, "role": "worker", "local_world_size": 1, "local_worker_id": 0,
        "chunk_size": 16,
    }  # fmt: skip
    accepted = inspect.signature(Metadata).parameters
    metadata = Metadata(**{name: value for name, value in known.items() if name in accepted})
    keys = ChunkedTokenDatabase(config, metadata)
    vars(sys.modules[LMCacheEngine.__module__])["assert_layerwise_gpu_connector"] = lambda connector: None
    engine = LMCacheEngine(config, metadata, keys, connector, lambda tensor, src: tensor, lambda each, src: each)
    engine.post_init(async_lookup_server=mock.Mock())
    return Engine(engine, config, keys, mode)


def last(layers: Iterable[Any]) -> Any:
    return deque(layers, maxlen=1).pop()


def after_one_load(mode: str, skip: int | None) -> list[Any]:
    """Return the number of loaded tokens, and the distinct [references, pins, validity] of the cached chunks."""
    made = make_engine(mode)
    engine = made.cache_engine
    made.store()
    if mode == "async":
        chunks = [(key, end - start) for start, end, key in made.keys.process_tokens(TOKENS, make_key=False)]
        hashes, lengths = [key for key, _ in chunks], [length for _, length in chunks]
        engine.async_lookup_and_prefetch(lookup_id="r", hashes=hashes, offsets=lengths, pin=True)
        until, events = time.monotonic() + 20, engine.event_manager
        while events.get_event_status(next(iter(type(next(iter(events.events))))), "r").name != "DONE":
            assert time.monotonic() < until
            time.sleep(0.01)
    else:
        for waiting in "ro":  # request o pins the chunks too, but never loads them
            made.look_up(waiting)
    moved = 0
    if skip is None:
        engine.cleanup_memory_objs("r")  # the lookup client calls this after an abort
    else:
        moved = made.load("r", skip)
    engine.lookup_unpin("r")
    chunks = [[chunk.meta.ref_count, chunk.meta.pin_count, chunk.is_valid()] for chunk in made.cached()]
    assert len(chunks) >= 4
    return [moved, [state for state, _ in itertools.groupby(chunks)]]


@pytest.mark.parametrize(("mode", "release"), [("", "0.5.5"), ("layers", "0.5.6")])
@answers([0], [1], also="release")
def test_a_pin_that_comes_during_a_load_stays(mode: str) -> list[int]:
    """While request r loads chunks, a lookup pins the chunks for request o. Then return the distinct pin counts."""

    def lookup_of_o() -> None:
        thread = threading.Thread(target=made.look_up, args=("o",))
        thread.start()
        thread.join()

    made = make_engine(mode, lookup_of_o)
    made.store()
    made.look_up("r")
    assert made.load("r") == 64
    made.cache_engine.lookup_unpin("r")
    return sorted(set(made.pins()))


@answers([1], fixes=True)
def test_a_load_that_ends_early_leaves_no_pin() -> list[int]:
    """One of two layerwise loads ends early. LMCache must keep only the pin of request o. Return the pin counts."""
    made = make_engine("layers")
    made.store()
    for name in "rso":
        made.look_up(name)
    first, second = (made.move("retrieve", name) for name in "rs")
    next(first), next(second)
    last(first)
    second.close()
    for name in "rs":
        made.cache_engine.lookup_unpin(name)
    return sorted(set(made.pins()))


#: (mode, release, tokens that vLLM has (None: abort before the load), states of cached chunks without fixes).
AFTER_ONE_LOAD = [
    ("async", "0.3.15", 0, [[1, 1, True]]),  # wrong: pinned for ever
    ("async", "0.5.1", 0, [[1, 0, True]]),  # right
    ("async", "0.5.6", 0, [[0, 0, False]]),  # wrong: freed, but still in the cache
    ("", "0.5.1", 0, [[1, 1, True]]),  # right: only request o still pins the chunks
    ("", "0.5.5", 0, [[1, 0, True]]),  # wrong: the pin of request o is gone
    ("layers", "0.5.6", 0, [[1, 0, True]]),
    ("async", "0.3.15", None, [[2, 1, True]]),
    # LMCache also fetches the two chunks that vLLM has. 0.4.1 frees both chunks twice. 0.5.6 frees all four twice.
    ("async", "0.4.1", 32, [[0, 0, False], [1, 0, True]]),
    ("async", "0.5.6", 32, [[0, 0, False]]),
]


def right(mode: str) -> list[Any]:
    """Return the right references, pins and validity of a chunk. Request o pins the chunk, except in mode "async"."""
    return [1, int(mode != "async"), True]


@pytest.mark.parametrize(("mode", "name", "skip", "released"), AFTER_ONE_LOAD)
@pytest.mark.parametrize("fixes", [False, True], ids=["released", "fixed"])
def test_chunks_after_one_load(mode: str, name: str, skip: int | None, released: Any, fixes: bool, once: Once) -> None:
    moved, states = once(after_one_load, RELEASES / name, mode, skip, fixes=fixes)
    assert moved == (0 if skip is None else 64 - skip)
    assert states == ([right(mode)] if fixes else released)


class Worker:
    def __init__(self) -> None:
        from kvfix_tools.lab.connectors.v1 import adapter_in_worker

        self.engine = make_engine("layers")
        self.module: Any = import_module(ADAPTER)
        self.adapter = adapter_in_worker(
            self.module.LMCacheConnectorV1Impl, self.engine.cache_engine, ["layer"], kv_role="kv_both",
            config=self.engine.config, async_loading=False, _block_size=16, _lmcache_chunk_size=16,
            _stats_monitor=mock.Mock(), layerwise_storers=[],
            _vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)),
        )  # fmt: skip

    def _meta(self, name: str, tag: str, load: bool, hit: int) -> Any:
        import torch

        save = self.module.SaveSpec(skip_leading_tokens=0, can_save=not load or hit < len(TOKENS))
        spec = self.module.LoadSpec(vllm_cached_tokens=0, lmcache_cached_tokens=hit, can_load=True) if load else None
        meta = self.module.ReqMeta(
            req_id=name, token_ids=list(TOKENS), slot_mapping=torch.arange(64), save_spec=save, load_spec=spec,
            is_last_prefill=True,
        )  # fmt: skip
        meta.request_configs = {"lmcache.tag.kvfix": tag} if tag else None
        return meta

    def step(self, requests: dict[str, str], load: bool, hit: int = 64) -> None:
        """Run a step that loads or stores. requests: tags by request id. A load of the whole prompt stores nothing."""
        import torch

        metadata = self.module.LMCacheConnectorMetadata()
        metadata.requests = [self._meta(name, tag, load, hit) for name, tag in requests.items()]
        self.adapter._parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
        self.adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
        self.adapter.wait_for_layer_load("layer")
        self.adapter.save_kv_layer("layer", torch.zeros(1), None)
        self.adapter.wait_for_save()

    def found(self, name: str, tag: str = "") -> int:
        configs = {"lmcache.tag.kvfix": tag} if tag else None
        return int(self.engine.cache_engine.lookup(TOKENS, lookup_id=name, pin=True, request_configs=configs))


@pytest.mark.parametrize("release", ["0.4.6", "0.5.6"])
@answers([0, 0, 0, 64, [], True], [64, 64, 0, 0, ["b", "a"], True], also="release", fixes=["KVF017"])
def test_each_tenant_has_keys_of_its_own() -> list[Any]:
    """Tenants a and b store one prompt. Return the hits of a, b, tenant c and no tenant, and the tags of the loads."""
    worker = Worker()
    worker.step({"one": "a", "other": "b"}, load=False)
    found = [worker.found(*each) for each in (("again", "a"), ("another", "b"), ("stranger", "c"), ("untagged",))]
    engine = worker.engine.cache_engine
    load = engine.retrieve_layer = mock.Mock(wraps=engine.retrieve_layer)
    worker.step({"another": "b", "again": "a"}, load=True)
    loaded = [call.kwargs.get("request_configs") for call in load.call_args_list]
    return [*found, [configs["lmcache.tag.kvfix"] for configs in loaded if configs], engine.retrieve_layer is load]


@answers([0] * 4, [1] * 4)
def test_a_load_leaves_the_pins_of_other_requests() -> list[int]:
    """The adapter passes no request id to a load, so KVF018 finds the id. A request that waits keeps its pins."""
    worker = Worker()
    worker.step({"one": ""}, load=False)
    worker.found("r")
    worker.found("waits")
    worker.step({"r": ""}, load=True)
    return worker.engine.pins()


#: (fixes, number of hit chunks that are still cached, tokens of the hit, [failed blocks, number of cached chunks])
SHORT = [
    (False, 0, 64, ["dies", 0]), (False, 2, 64, [[], 2]), (["KVF026"], 0, 64, [[0, 1, 2, 3], 0]),
    (True, 2, 64, [[2, 3], 2]), (True, 4, 64, [[], 4]),
    # One of two hit chunks is gone, so vLLM computes the rest from wrong KV. KVF026 alone lets LMCache store the rest.
    (["KVF026"], 1, 32, [[1], 4]), (True, 1, 32, [[1], 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fixes", "left", "hit", "answer", "release"),
    [*((*each, "0.5.6") for each in SHORT), *((*each, "0.3.15") for each in SHORT if each[2] == 64)],
)
@answers(also="fixes release answer")
def test_a_load_that_comes_short(left: int, hit: int) -> tuple[Any, int]:
    """The last chunks of a load are missing. Return the failed blocks, or "dies", and the number of cached chunks."""
    worker = Worker()
    worker.step({"one": ""}, load=False)
    cached = worker.engine.cache_engine.storage_manager.local_cpu_backend.hot_cache
    for key in list(cached)[left:]:
        del cached[key]
    try:
        worker.step({"r": ""}, load=True, hit=hit)
    except UnboundLocalError:
        return "dies", len(cached)
    return sorted(worker.adapter._invalid_block_ids), len(cached)
