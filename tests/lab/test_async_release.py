"""LMCache's own cache engine on the CPU: what an asynchronous load does to the chunks it has read.

Below the lab's stand-in: the real engine, storage manager and memory objects, with a GPU connector that moves nothing.
From 0.5.2 on each chunk is released twice, by `retrieve` and by the clean-up in `lookup_unpin` (0.5.6
cache_engine.py:962-964, :1409-1441): it is freed while the cache still lists it, and the next hit of it gets a memory
object without a tensor, which the GPU connector asserts. Up to 0.3.15 its pin is never taken back.
"""

from __future__ import annotations

import pytest

from tests.conftest import RELEASES, Fresh

CODE = """
import inspect, logging, os, sys, time
sys.path.insert(0, {path!r})
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

class Connector:
    def get_shape(self, tokens):
        return torch.Size([2, 1, tokens, 8])
    def __getattr__(self, name):
        return lambda *_, **__: None

class Server:
    answers = {{}}
    def send_response_to_scheduler(self, lookup_id, tokens):
        self.answers[lookup_id] = tokens

config = LMCacheEngineConfig.from_defaults(
    chunk_size=16, local_cpu=True, max_local_cpu_size=0.05, enable_async_loading=True, save_unfull_chunk=False,
    lmcache_instance_id="lab")
known = dict(model_name="m", world_size=1, worker_id=0, fmt="vllm", kv_dtype=torch.float32, kv_shape=(1, 2, 16, 1, 8),
    use_mla=False, role="worker", local_world_size=1, local_worker_id=0, chunk_size=16)
metadata = Metadata(**{{k: v for k, v in known.items() if k in inspect.signature(Metadata).parameters}})
keys = ChunkedTokenDatabase(config, metadata)
engine = LMCacheEngine(config, metadata, keys, Connector(), lambda tensor, src: tensor, lambda thing, src: thing)
engine.post_init(async_lookup_server=Server())
tokens, slots, mask = list(range(64)), torch.arange(64), torch.ones(64, dtype=torch.bool)
engine.store(tokens, mask=mask, kvcaches=[], slot_mapping=slots, offset=0, req_id="first")
chunks = [(key, end - start) for start, end, key in keys.process_tokens(tokens, make_key=False)]
engine.async_lookup_and_prefetch(lookup_id="r", hashes=[key for key, _ in chunks],
    offsets=[length for _, length in chunks], pin=True)
until = time.monotonic() + 20
while engine.event_manager.get_event_status(list(type(next(iter(engine.event_manager.events))))[0], "r").name != "DONE":
    assert time.monotonic() < until
    time.sleep(0.01)
moved = int(engine.retrieve(tokens, mask, kvcaches=[], slot_mapping=slots, req_id="r").sum())
engine.lookup_unpin("r")
cached = list(engine.storage_manager.local_cpu_backend.hot_cache.values())
result = [moved, [[chunk.meta.ref_count, chunk.meta.pin_count, chunk.is_valid()] for chunk in cached]]
import json
print(json.dumps(result), flush=True)
os._exit(0)  # its threads would keep the process
"""

#: release -> references, pins and validity of each cached chunk after one load of it; as released, and with KVF013
AFTER_ONE_LOAD = {
    "0.3.15": ([1, 1, True], [1, 1, True]),  # pinned for ever
    "0.5.1": ([1, 0, True], [1, 0, True]),  # right
    "0.5.6": ([0, 0, False], [1, 0, True]),  # freed, and still listed
}


@pytest.mark.parametrize("release", AFTER_ONE_LOAD)
@pytest.mark.parametrize("only", ["only=[]", ""])
def test_chunks_after_one_load(release: str, only: str, fresh: Fresh) -> None:
    moved, chunks = fresh(CODE.format(path=str(RELEASES / release), only=only))
    assert moved == 64
    assert chunks == [AFTER_ONE_LOAD[release][only == ""]] * 4
