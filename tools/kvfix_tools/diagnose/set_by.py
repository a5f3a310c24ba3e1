"""Which setting stands behind a name in a check that failed."""

from __future__ import annotations

import re

#: (part of a name in the code, what sets it)
_SET_BY = (
    (r"hash_block_size|gpu_block_size|block_size", "--block-size (of a hybrid model: its own)"),
    (r"chunk_size|blocks_per_chunk", "chunk_size (LMCACHE_CHUNK_SIZE) or blocks_per_chunk"),
    (r"tp_size|tensor_parallel|tp_rank|world_size", "--tensor-parallel-size"),
    (r"pp_size|pipeline_parallel|pp_rank", "--pipeline-parallel-size"),
    (r"dp_size|data_parallel|dp_rank", "--data-parallel-size"),
    (r"dcp|pcp|context_parallel", "--decode-context-parallel-size"),
    (r"kv_role|is_producer|is_consumer|is_kv_", "kv_role in --kv-transfer-config"),
    (r"cache_dtype|kv_dtype", "--kv-cache-dtype"),
    (r"layout|stride_order", "VLLM_KV_CACHE_LAYOUT, or the attention backend"),
    (r"kv_cache_groups|num_groups|group_id", "--disable-hybrid-kv-cache-manager, or the model"),
    (r"mamba", "--mamba-cache-mode, or the model"),
    (r"num_(?:gpu_)?blocks\b", "--num-gpu-blocks-override, or --gpu-memory-utilization"),
    (r"num_(?:hidden_)?layers|layer_name", "the model, or --speculative-config"),
    (r"speculative|num_spec|draft|eagle", "--speculative-config"),
    (r"prefix_cach", "--enable-prefix-caching"),
    (r"max_model_len", "--max-model-len"),
    (r"async_scheduling", "--async-scheduling"),
    (r"\b\w*port\b", "the ports of --kv-transfer-config"),
    (r"cpu_bytes|num_cpu_blocks", "cpu_bytes_to_use in kv_connector_extra_config"),
)
#: Settings named at once.
_MOST = 3


def settings(source: str) -> list[str]:
    """What sets the names in this line of code, in the order of the table."""
    return [setting for name, setting in _SET_BY if re.search(name, source)][:_MOST]
