"""LMCache's own cache engine on the CPU: the references and pins of chunks after a load.

The engine, storage manager and memory objects are real. Only the GPU connector is replaced: it copies nothing.

- Since 0.5.2 each chunk is released twice, by `retrieve` and in `lookup_unpin` (0.5.6 cache_engine.py:962-964,
1409-1441). It is freed while it is cached, and the next hit gets a memory object without a tensor.
- Up to 0.3.15 its pin is never released.
- Without asynchronous loading the pin is released twice, from 0.5.2 to 0.5.5, and layerwise since 0.4.3. The second
release takes the pin of another request.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

import kvfix
from tests.conftest import RELEASES, Once


class Engine(NamedTuple):
    cache_engine: Any
    config: Any
    keys: Any

    def cached(self) -> list[Any]:
        return list(self.cache_engine.storage_manager.local_cpu_backend.hot_cache.values())


def make_engine(mode: str, only: list[str] | None, loading: Callable[[], None] = lambda: None) -> Engine:
    """LMCache's engine with these fixes. mode: with layers, async, or "" for neither. loading: called in each load."""
    kvfix.apply(only=only)
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

    class GPUConnector:
        batched_from_gpu = forever

        def batched_to_gpu(self, *_: Any, **__: Any) -> Iterator[None]:
            loading()
            return forever()

        def get_shape(self, tokens: int) -> Any:
            return torch.Size([2, 1, tokens, 8])

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    class LookupServer:
        def send_response_to_scheduler(self, lookup_id: str, tokens: int) -> None: ...

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
    engine = LMCacheEngine(config, metadata, keys, GPUConnector(), lambda tensor, src: tensor, lambda each, src: each)
    engine.post_init(async_lookup_server=LookupServer())
    return Engine(engine, config, keys)


def last(layers: Iterable[Any]) -> Any:
    return deque(layers, maxlen=1).pop()


def after_one_load(mode: str, only: list[str] | None, load: bool = True, skip: int = 0) -> Any:
    """Tokens moved, and references, pins and validity of each cached chunk. skip: tokens that vLLM has."""
    made = make_engine(mode, only)
    import torch

    engine, keys = made.cache_engine, made.keys
    tokens, mask = list(range(64)), torch.ones(64, dtype=torch.bool)
    known = {"kvcaches": [], "slot_mapping": torch.arange(64)}
    if mode == "layers":
        last(engine.store_layer(tokens, mask=mask, offset=0, req_id="first", **known))
    else:
        engine.store(tokens, mask=mask, offset=0, req_id="first", **known)
    if mode == "async":
        chunks = [(key, end - start) for start, end, key in keys.process_tokens(tokens, make_key=False)]
        hashes, lengths = [key for key, _ in chunks], [length for _, length in chunks]
        engine.async_lookup_and_prefetch(lookup_id="r", hashes=hashes, offsets=lengths, pin=True)
        until, events = time.monotonic() + 20, engine.event_manager
        while events.get_event_status(next(iter(type(next(iter(events.events))))), "r").name != "DONE":
            assert time.monotonic() < until
            time.sleep(0.01)
    else:
        for waiting in "ro":  # another request waits, with its pins on the same chunks
            assert engine.lookup(tokens, lookup_id=waiting, pin=True) == 64
    mask[:skip] = False
    if not load:
        engine.cleanup_memory_objs("r")  # the client of an aborted lookup has it cleaned up
        moved = 64
    elif mode == "layers":
        moved = int(last(engine.retrieve_layer(tokens, mask, req_id="r", **known)).sum())
    else:
        moved = int(engine.retrieve(tokens, mask, req_id="r", **known).sum())
    engine.lookup_unpin("r")
    return [moved, [[chunk.meta.ref_count, chunk.meta.pin_count, chunk.is_valid()] for chunk in made.cached()]]


def after_a_lookup_during_a_load(mode: str, only: list[str] | None) -> list[int]:
    """Pins of each cached chunk, where the lookup server's thread pins the chunks for request o while r loads them."""

    def lookup_of_o() -> None:
        thread = threading.Thread(target=engine.lookup, args=(tokens,), kwargs={"lookup_id": "o", "pin": True})
        thread.start()
        thread.join()

    made = make_engine(mode, only, lookup_of_o)
    import torch

    engine, tokens, mask = made.cache_engine, list(range(64)), torch.ones(64, dtype=torch.bool)
    known = {"kvcaches": [], "slot_mapping": torch.arange(64)}
    store, load = (engine.store_layer, engine.retrieve_layer) if mode else (engine.store, engine.retrieve)
    deque(store(tokens, mask=mask, offset=0, req_id="first", **known) or ())
    assert engine.lookup(tokens, lookup_id="r", pin=True) == 64
    loaded = load(tokens, mask, req_id="r", **known)
    assert int((last(loaded) if mode else loaded).sum()) == 64
    engine.lookup_unpin("r")
    return [chunk.meta.pin_count for chunk in made.cached()]


def after_loads_in_turn(only: list[str] | None) -> list[int]:
    """Pins of each cached chunk after two loads by layers that take turns. The second ends before its last layer."""
    made = make_engine("layers", only)
    import torch

    engine, tokens, mask = made.cache_engine, list(range(64)), torch.ones(64, dtype=torch.bool)
    known = {"kvcaches": [], "slot_mapping": torch.arange(64)}
    last(engine.store_layer(tokens, mask=mask, offset=0, req_id="first", **known))
    loads = []
    for name in "rso":
        assert engine.lookup(tokens, lookup_id=name, pin=True) == 64
    for name in "rs":
        loads.append(engine.retrieve_layer(tokens, mask, req_id=name, **known))
        next(loads[-1])
    last(loads[0])
    loads[1].close()
    for name in "rs":
        engine.lookup_unpin(name)
    return [chunk.meta.pin_count for chunk in made.cached()]


FIXES = pytest.mark.parametrize("only", [[], None], ids=["released", "fixed"])
#: (mode, release) -> references, pins and validity of each cached chunk after one load of it, as released and fixed
AFTER_ONE_LOAD = {
    ("async", "0.3.15"): ([1, 1, True], [1, 0, True]),  # pinned for ever
    ("async", "0.5.1"): ([1, 0, True], [1, 0, True]),  # right
    ("async", "0.5.6"): ([0, 0, False], [1, 0, True]),  # freed, and still listed
    ("", "0.5.1"): ([1, 1, True], [1, 1, True]),  # right: the other's pin is there
    ("", "0.5.5"): ([1, 0, True], [1, 1, True]),  # the other's pin is released
    ("layers", "0.5.6"): ([1, 0, True], [1, 1, True]),
}


@pytest.mark.parametrize(("mode", "name"), AFTER_ONE_LOAD)
@FIXES
def test_chunks_after_one_load(mode: str, name: str, only: list[str] | None, once: Once) -> None:
    moved, chunks = once(after_one_load, RELEASES / name, mode, only)
    assert moved == 64
    assert chunks == [AFTER_ONE_LOAD[mode, name][only is None]] * len(chunks)
    assert len(chunks) >= 4


@pytest.mark.parametrize(("mode", "name"), [("", "0.5.5"), ("layers", "0.5.6")])
@FIXES
def test_a_pin_that_comes_during_a_load_stays(mode: str, name: str, only: list[str] | None, once: Once) -> None:
    assert set(once(after_a_lookup_during_a_load, RELEASES / name, mode, only)) == {only is None}


def test_a_load_that_ends_early_leaves_no_pin(once: Once) -> None:
    """The release of the other load, in the same thread, is not taken for one of this load."""
    assert set(once(after_loads_in_turn, RELEASES / "0.5.6", None)) == {1}


@FIXES
def test_chunks_of_an_aborted_lookup(only: list[str] | None, once: Once) -> None:
    _, chunks = once(after_one_load, RELEASES / "0.3.15", "async", only, False)
    assert chunks == [[1, 0, True] if only is None else [2, 1, True]] * 4


#: The state of the first two chunks, which vLLM has, and of the two that are loaded; as released.
UNUSED = {"0.4.1": ([0, 0, False], [1, 0, True]), "0.5.6": ([0, 0, False], [0, 0, False])}


@pytest.mark.parametrize("name", UNUSED)
@FIXES
def test_chunks_that_vllm_has_are_released_once(only: list[str] | None, name: str, once: Once) -> None:
    """They were fetched too, and no request loads them: 0.4.1 releases these twice, 0.5.6 all."""
    moved, chunks = once(after_one_load, RELEASES / name, "async", only, True, 32)
    unused, used = UNUSED[name] if only == [] else ([1, 0, True], [1, 0, True])
    assert moved == 32
    assert chunks == [unused] * 2 + [used] * 2
