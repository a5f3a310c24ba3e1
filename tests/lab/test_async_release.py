"""LMCache's own cache engine on the CPU: the references and pins of chunks after a load (KVF013, KVF018).

The engine, storage manager and memory objects are real. Only the GPU connector is replaced: it copies nothing.
"""

import inspect
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.conftest import RELEASES, Once, answers

TOKENS = list(range(64))


class Engine(NamedTuple):
    """mode: "layers", "async", or "" for neither."""

    cache_engine: Any
    config: Any
    keys: Any
    mode: str

    def _move(self, kind: str, name: str, skip: int = 0, **more: Any) -> Any:
        import torch

        mask = torch.ones(64, dtype=torch.bool)
        mask[:skip] = False
        move = getattr(self.cache_engine, f"{kind}_layer" if self.mode == "layers" else kind)
        return move(TOKENS, mask=mask, req_id=name, kvcaches=[], slot_mapping=torch.arange(64), **more)

    def store(self) -> None:
        deque(self._move("store", "first", offset=0) or ())

    def layers(self, name: str) -> Iterator[Any]:
        loaded: Iterator[Any] = self._move("retrieve", name)
        return loaded

    def load(self, name: str, skip: int = 0) -> int:
        """Return the number of loaded tokens. skip: tokens that vLLM has."""
        loaded = self._move("retrieve", name, skip)
        return int((last(loaded) if self.mode == "layers" else loaded).sum())

    def look_up(self, name: str) -> None:
        assert self.cache_engine.lookup(TOKENS, lookup_id=name, pin=True) == 64

    def cached(self) -> list[Any]:
        return list(self.cache_engine.storage_manager.local_cpu_backend.hot_cache.values())

    def pins(self) -> list[int]:
        return [chunk.meta.pin_count for chunk in self.cached()]


def make_engine(mode: str, loading: Callable[[], None] = lambda: None) -> Engine:
    """LMCache's engine. loading: called in each load."""
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
    return Engine(engine, config, keys, mode)


def last(layers: Iterable[Any]) -> Any:
    return deque(layers, maxlen=1).pop()


def after_one_load(mode: str, skip: int | None) -> list[Any]:
    """Return the moved tokens, and references, pins and validity of the cached chunks, equal neighbours once.

    skip: tokens that vLLM has. None: the lookup is aborted.
    """
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
        for waiting in "ro":  # another request waits, with its pins on the same chunks
            made.look_up(waiting)
    moved = 0
    if skip is None:
        engine.cleanup_memory_objs("r")  # the client of an aborted lookup has it cleaned up
    else:
        moved = made.load("r", skip)
    engine.lookup_unpin("r")
    chunks = [[chunk.meta.ref_count, chunk.meta.pin_count, chunk.is_valid()] for chunk in made.cached()]
    assert len(chunks) >= 4
    return [moved, [state for state, _ in itertools.groupby(chunks)]]


@pytest.mark.parametrize(("mode", "release"), [("", "0.5.5"), ("layers", "0.5.6")])
@answers([0], [1], also="release")
def test_a_pin_that_comes_during_a_load_stays(mode: str) -> list[int]:
    """The lookup server's thread pins the chunks for request o while r loads them. Return the pins of the chunks."""

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
    """Two loads by layers take turns, and the second one ends before its last layer.

    The release of the first load, in the same thread, is not taken for one of the second. Return the chunks' pins.
    """
    made = make_engine("layers")
    made.store()
    for name in "rso":
        made.look_up(name)
    first, second = (made.layers(name) for name in "rs")
    next(first), next(second)
    last(first)
    second.close()  # type: ignore[attr-defined]
    for name in "rs":
        made.cache_engine.lookup_unpin(name)
    return sorted(set(made.pins()))


#: (mode, release, tokens that vLLM has, or None for an aborted lookup, states of the cached chunks as released)
AFTER_ONE_LOAD = [
    ("async", "0.3.15", 0, [[1, 1, True]]),  # pinned for ever
    ("async", "0.5.1", 0, [[1, 0, True]]),  # right
    ("async", "0.5.6", 0, [[0, 0, False]]),  # freed, and still listed
    ("", "0.5.1", 0, [[1, 1, True]]),  # right: the other's pin is there
    ("", "0.5.5", 0, [[1, 0, True]]),  # the other's pin is released
    ("layers", "0.5.6", 0, [[1, 0, True]]),
    ("async", "0.3.15", None, [[2, 1, True]]),
    # The chunks that vLLM has were fetched too, and no request loads them: 0.4.1 releases these twice, 0.5.6 all
    ("async", "0.4.1", 32, [[0, 0, False], [1, 0, True]]),
    ("async", "0.5.6", 32, [[0, 0, False]]),
]


def right(mode: str) -> list[Any]:
    """References, pins and validity of a chunk. Another request waits for it, unless the load is asynchronous."""
    return [1, int(mode != "async"), True]


@pytest.mark.parametrize(("mode", "name", "skip", "released"), AFTER_ONE_LOAD)
@pytest.mark.parametrize("fixes", [False, True], ids=["released", "fixed"])
def test_chunks_after_one_load(
    mode: str, name: str, skip: int | None, released: list[Any], fixes: bool, once: Once
) -> None:
    moved, states = once(after_one_load, RELEASES / name, mode, skip, fixes=fixes)
    assert moved == (0 if skip is None else 64 - skip)
    assert states == ([right(mode)] if fixes else released)
