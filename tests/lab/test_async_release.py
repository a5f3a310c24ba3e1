"""LMCache's own cache engine on the CPU: what a load does to the chunks it has read.

Below the lab's stand-in: the real engine, storage manager and memory objects, with a GPU connector that moves nothing.
From 0.5.2 on each chunk is released twice, by `retrieve` and by the clean-up in `lookup_unpin` (0.5.6
cache_engine.py:962-964, :1409-1441): it is freed while the cache still lists it, and the next hit of it gets a memory
object without a tensor, which the GPU connector asserts. Up to 0.3.15 its pin is never taken back. Without asynchronous
loading it is the pin that goes twice, from 0.5.2 to 0.5.5, and with layers from 0.4.3 on: that of another request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ForkServer

#: The engine, in the mode that is asked for: with layers, asynchronous, or neither.
ENGINE = """
import inspect, logging, os, sys, time
os.environ["LMCACHE_TRACK_USAGE"] = "false"
import kvfix
kvfix.apply({only})
logging.disable(logging.CRITICAL)
import torch
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase
try:
    from lmcache.v1.metadata import LMCacheMetadata as Metadata
except ImportError:
    from lmcache.config import LMCacheEngineMetadata as Metadata

def forever():
    while True:
        yield
class Connector:
    def get_shape(self, tokens):
        return torch.Size([2, 1, tokens, 8])
    def batched_to_gpu(self, *_, **__):
        return forever()
    batched_from_gpu = batched_to_gpu
    def __getattr__(self, name):
        return lambda *_, **__: None

class Server:
    answers = {{}}
    def send_response_to_scheduler(self, lookup_id, tokens):
        self.answers[lookup_id] = tokens

config = LMCacheEngineConfig.from_defaults(
    chunk_size=16, local_cpu=True, max_local_cpu_size=0.05, save_unfull_chunk=False, lmcache_instance_id="lab",
    enable_async_loading={mode!r} == "async", use_layerwise={mode!r} == "layers")
known = dict(model_name="m", world_size=1, worker_id=0, fmt="vllm", kv_dtype=torch.float32, kv_shape=(1, 2, 16, 1, 8),
    use_mla=False, role="worker", local_world_size=1, local_worker_id=0, chunk_size=16)
metadata = Metadata(**{{k: v for k, v in known.items() if k in inspect.signature(Metadata).parameters}})
keys = ChunkedTokenDatabase(config, metadata)
sys.modules[LMCacheEngine.__module__].assert_layerwise_gpu_connector = lambda connector: None
engine = LMCacheEngine(config, metadata, keys, Connector(), lambda tensor, src: tensor, lambda thing, src: thing)
engine.post_init(async_lookup_server=Server())
"""
CODE = (
    ENGINE
    + """
tokens, slots, mask = list(range(64)), torch.arange(64), torch.ones(64, dtype=torch.bool)
known = dict(kvcaches=[], slot_mapping=slots)
def run(layers):
    for answer in layers:
        pass
    return answer
if {mode!r} == "layers":
    run(engine.store_layer(tokens, mask=mask, offset=0, req_id="first", **known))
else:
    engine.store(tokens, mask=mask, offset=0, req_id="first", **known)
if {mode!r} == "async":
    chunks = [(key, end - start) for start, end, key in keys.process_tokens(tokens, make_key=False)]
    engine.async_lookup_and_prefetch(lookup_id="r", hashes=[key for key, _ in chunks],
        offsets=[length for _, length in chunks], pin=True)
    until = time.monotonic() + 20
    events = engine.event_manager
    while events.get_event_status(list(type(next(iter(events.events))))[0], "r").name != "DONE":
        assert time.monotonic() < until
        time.sleep(0.01)
else:
    for waiting in "ro":  # another request waits, with its pins on the same chunks
        assert engine.lookup(tokens, lookup_id=waiting, pin=True) == 64
mask[:{skip}] = False
if not {load}:
    engine.cleanup_memory_objs("r")  # the client of an aborted lookup has it cleaned up
    moved = 64
elif {mode!r} == "layers":
    moved = int(run(engine.retrieve_layer(tokens, mask, req_id="r", **known)).sum())
else:
    moved = int(engine.retrieve(tokens, mask, req_id="r", **known).sum())
engine.lookup_unpin("r")
cached = list(engine.storage_manager.local_cpu_backend.hot_cache.values())
result = [moved, [[chunk.meta.ref_count, chunk.meta.pin_count, chunk.is_valid()] for chunk in cached]]
"""
)

#: (mode, release) -> references, pins and validity of each cached chunk after one load of it, as released and fixed
AFTER_ONE_LOAD = {
    ("async", "0.3.15"): ([1, 1, True], [1, 0, True]),  # pinned for ever
    ("async", "0.5.1"): ([1, 0, True], [1, 0, True]),  # right
    ("async", "0.5.6"): ([0, 0, False], [1, 0, True]),  # freed, and still listed
    ("", "0.5.1"): ([1, 1, True], [1, 1, True]),  # right: the other's pin is there
    ("", "0.5.5"): ([1, 0, True], [1, 1, True]),  # the other's pin is gone
    ("layers", "0.5.6"): ([1, 0, True], [1, 1, True]),
}


@pytest.mark.parametrize(("mode", "name"), AFTER_ONE_LOAD)
@pytest.mark.parametrize("only", ["only=[]", ""])
def test_chunks_after_one_load(mode: str, name: str, only: str, fork_server: ForkServer, release: Any) -> None:
    moved, chunks = fork_server(CODE.format(only=only, mode=mode, load=True, skip=0), release(name))
    assert moved == 64
    assert chunks == [AFTER_ONE_LOAD[mode, name][only == ""]] * len(chunks)
    assert len(chunks) >= 4


@pytest.mark.parametrize(("only", "chunk"), [("only=[]", [2, 1, True]), ("", [1, 0, True])], ids=["released", "fixed"])
def test_chunks_of_an_aborted_lookup(only: str, chunk: list[Any], fork_server: ForkServer, release: Any) -> None:
    """0.3.15 releases none of them."""
    _, chunks = fork_server(CODE.format(only=only, mode="async", load=False, skip=0), release("0.3.15"))
    assert chunks == [chunk] * 4


#: What is left of the first two chunks, which vLLM has, and of the two that are loaded; as released.
UNUSED = {"0.4.1": ([0, 0, False], [1, 0, True]), "0.5.6": ([0, 0, False], [0, 0, False])}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("only", ["only=[]", ""])
def test_chunks_that_vllm_has_are_released_once(only: str, name: str, fork_server: ForkServer, release: Any) -> None:
    """They were fetched too, and no request loads them: 0.4.1 releases these twice, 0.5.6 all."""
    moved, chunks = fork_server(CODE.format(only=only, mode="async", load=True, skip=32), release(name))
    unused, used = UNUSED[name] if only else ([1, 0, True], [1, 0, True])
    assert moved == 32
    assert chunks == [unused] * 2 + [used] * 2
