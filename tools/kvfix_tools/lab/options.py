"""What a lab engine is made with: everything that changes token accounting."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

#: Settings of LMCache that it has not always had, and the releases that have them.
SINCE = {
    "enable_async_loading": ">=0.3.10",
    "min_retrieve_tokens": ">=0.3.14",
    "max_tokens_per_load": ">=0.4.7",
    "mp.eager_prefetch": ">=0.5.4",
    "mp.save_decode_cache": ">=0.5.6",
}
#: Options of the lab that are drawn only with these releases of vLLM. With asynchronous scheduling earlier ones preempt
#: between two steps only where they reset their prefix cache, all at once; the lab does it to one, and the output that
#: is under way comes twice. The second runner was for trials then.
DRAWN = {"async_scheduling": ">=0.32", "model_runner_v2": ">=0.32"}
CONNECTORS = ("v1", "mp", "mp-in-tree")
#: Options that are no sizes.
_SWITCHES = (
    "beside",
    "async_scheduling",
    "model_runner_v2",
    "save_last",
    "prefix_caching",
    "reserve_full_isl",
    "kv_load_failure_policy",
)


@dataclass(frozen=True)
class Options:
    """Sizes in tokens, but `num_blocks` in blocks. `lmcache`: settings of LMCache by their own names."""

    #: v1 (in process), mp (LMCache's multi-process connector) or mp-in-tree (vLLM's copy of it)
    connector: str = "v1"
    #: In a MultiConnector, behind another one that is asked first (beside.py). v1 only.
    beside: bool = False
    #: Steps until a lookup, load or store of the multi-process server is done; 0: at once.
    delay: int = 1
    block_size: int = 16
    num_blocks: int = 64
    chunk_size: int = 64
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 8
    max_model_len: int = 2048
    prefix_caching: bool = True
    #: Admit a request only if all of it fits (vLLM's default since it has the option; before, the first chunk decided).
    reserve_full_isl: bool = True
    #: A step is scheduled before the answer of the last one is there, as vLLM does by itself on a GPU.
    async_scheduling: bool = False
    #: For vLLM's model runner V2, which it takes for most models on a GPU: a resumed request comes as a new one.
    model_runner_v2: bool = False
    #: With a drafter vLLM asks a worker what is done, and what has failed, before it has the step saved.
    save_last: bool = False
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    lmcache: dict[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> list[str]:
        """What is not as it comes: settings of LMCache, and options of the lab by their own names."""
        switches = [each for each in fields(self) if each.name in _SWITCHES]
        return [*(each.name for each in switches if getattr(self, each.name) != each.default), *self.lmcache]
