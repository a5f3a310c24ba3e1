"""The KV groups of the lab's engines in vLLM's configuration, and the memory of their layers."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvfix_tools.lab.engine import byte_memory
from kvfix_tools.lab.engine.kv_groups import KVGroup, kv_groups
from kvfix_tools.lab.options import OF_VLLM, Options
from kvfix_tools.lab.releases import accepted

LAYER = "model.layers.{}.self_attn.attn"


def page_bytes(options: Options) -> int:
    """Return the bytes of the largest block in a layer."""
    return options.block_size * options.window_blocks * byte_memory.SLOT


def kv_cache(options: Options, config: VllmConfig) -> KVCacheConfig:
    """Return the KV groups. Only AnyConnector uses tensors: otherwise the lab's memory has the contents."""
    shape: dict[str, Any] = {"num_kv_heads": options.heads_of_rank, "head_size": 32, "dtype": torch.float32}
    # as get_kv_cache_configs does (v1/core/kv_cache_utils.py 0.32.0:2585)
    retained = max(0, getattr(config, "num_prefill_lookahead_tokens", 0) - 1)
    extra = accepted(SlidingWindowSpec, extra_retained_tokens=retained)
    if options.connector in OF_VLLM:  # blocks of all KV groups have one size, as in a hybrid model
        shape["page_size_padded"] = page_bytes(options)
    lab_groups = kv_groups(options)
    groups = [
        KVCacheGroupSpec(
            [LAYER.format(group.number + number * len(lab_groups)) for number in range(options.layers)],
            _spec(group, options, **shape, **(extra if group.window else {})),
        )
        for group in lab_groups
    ]
    tensors = _tensors(options, groups)
    return KVCacheConfig(num_blocks=options.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _tensors(options: Options, groups: list[KVCacheGroupSpec]) -> list[Any]:
    """Return the tensors of the layers; none for LMCache's connectors, which do not read them.

    All KV groups share the bytes: a block belongs to one of them at a time.
    """
    if not (options.any_connector or options.connector in OF_VLLM or options.simple_offloading):
        return []
    page = groups[0].kv_cache_spec.page_size_bytes
    of_layer = page * options.num_blocks
    return [
        kv_cache_interface.KVCacheTensor(
            size=of_layer * options.layers, layers=group.layer_names, layer_stride=of_layer, block_stride=page
        )
        for group in groups
    ]


def kv_caches(options: Options, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return {layer: its view of this memory}. The first dimension of the memory is the block."""
    return {LAYER.format(group.number): memory for group in kv_groups(options)}


def _spec(group: KVGroup, options: Options, **shape: Any) -> KVCacheSpec:
    if group.state:
        state = (group.block_size * byte_memory.FLOATS,)  # a page is as large as a page of full attention
        return MambaSpec(
            block_size=group.block_size,
            shapes=(state,),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=options.drafts,
        )
    if group.window:
        return SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **shape)
    return FullAttentionSpec(block_size=options.block_of_rank, **shape)
