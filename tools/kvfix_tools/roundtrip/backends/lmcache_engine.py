"""`lmcache-engine`: through LMCache's cache engine and its CPU storage, as its vLLM adapter calls it.

Keys, chunks, allocation and storage manager are real. The host memory is LMCache's, so what is looked at is what comes
back; how many tokens do is asked of the engine's answer.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch

from kvfix_tools.roundtrip.backends import Backend, lmcache
from kvfix_tools.roundtrip.cell_check import CellCheck, Transfer

NUMBERS = itertools.count()


class ThroughEngine(Transfer):
    def __init__(self, check: CellCheck) -> None:
        (geometry, self.caches), cell = lmcache.as_vllm(check), check.cell
        connector, metadata = lmcache.make(lmcache.CLASSES["v2"], geometry, check)
        from lmcache.v1.cache_engine import LMCacheEngine
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.token_database import ChunkedTokenDatabase

        self.chunk, name = int(cell.chunk), f"kvfix-{next(NUMBERS)}"
        self.count, self.tokens = cell.count, list[int]()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=self.chunk, local_cpu=True, save_unfull_chunk=True,
            max_local_cpu_size=2 * check.result.moved / (1 << 30) + 0.02,  # GiB, with room to align
            lmcache_instance_id=name,
        )  # fmt: skip
        keys = ChunkedTokenDatabase(config, metadata)
        # An engine collects garbage when it is made: a second and more for what vLLM's imports have left on the heap.
        gc.freeze()
        self.engine = LMCacheEngine(config, metadata, keys, connector, _same, _same)
        gc.unfreeze()
        self.engine.post_init()
        moved_by = lmcache.operations(check.device, "multi_layer_kv_transfer")
        self.operations = f"{moved_by}; V2, cache engine, LocalCPUBackend"

    def store(self, slots: torch.Tensor) -> None:
        first = next(NUMBERS) * self.count  # tokens of its own: LMCache stores nothing that it has
        self.tokens = list(range(first, first + self.count))
        everything = torch.ones(len(self.tokens), dtype=torch.bool)
        self.engine.store(self.tokens, mask=everything, offset=0, **self._more(slots))

    def load(self, slots: torch.Tensor, skip: int) -> None:
        wanted = torch.ones(len(self.tokens), dtype=torch.bool)
        wanted[: skip // self.chunk * self.chunk] = False
        found = self.engine.retrieve(self.tokens, wanted, vllm_cached_tokens=skip, **self._more(slots))
        if int(found.sum()) != int(wanted.sum()):
            raise RuntimeError(f"retrieved {int(found.sum())} of {int(wanted.sum())} tokens")

    def close(self) -> None:
        self.engine.close()

    def _more(self, slots: torch.Tensor) -> dict[str, Any]:
        return {"kvcaches": self.caches, "slot_mapping": slots, "req_id": "kvfix"}


def _same(thing: Any, source: int) -> Any:
    return thing


BACKENDS = (
    Backend(
        "lmcache-engine", "LMCache's cache engine and its CPU storage", ThroughEngine, lmcache.missing,
        axes={"layout": lmcache.LAYOUTS},
    ),
)  # fmt: skip
