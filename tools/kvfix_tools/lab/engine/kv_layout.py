"""Describe KV groups, the objects that LMCache's server stores for a chunk, and the KV cache tensors of layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface as specs

from kvfix_tools.lab.engine import byte_memory
from kvfix_tools.lab.options import OF_VLLM, Options
from kvfix_tools.lab.releases import accepted

LAYER = "model.layers.{}.self_attn.attn"


class KVGroup(NamedTuple):
    """A KV group.

    - window: number of tokens that a token attends to, including itself. 0 means all tokens
    - state: True if a block holds one Mamba state instead of KV. A full block holds the state after its last token. The
      last block of a request holds the state after the last computed token.
    """

    number: int
    block_size: int
    window: int = 0
    state: bool = False

    @property
    def kept(self) -> int:
        """Return how many tokens at the end of a hit this KV group needs. 0 means all tokens.

        LMCache treats a state as a window of one block (integration/vllm/kv_cache_groups.py 0.5.6:131).
        """
        return self.block_size if self.state else self.window

    def reads_from(self, computed: int) -> int:
        """Return the first token that a step reads (SlidingWindowManager.get_num_skipped_tokens)."""
        return max(0, computed - self.window + 1) if self.window else 0

    def right(self, contents: list[int]) -> list[int]:
        """Return the contents that this KV group's slots must have, if `contents` are the contents of KV group 0."""
        if self.state:
            contents = contents[-1:] * len(contents)
        return [content ^ self.number for content in contents] if self.number else contents


class StoredObject(NamedTuple):
    """The part of a chunk that the server stores under one key."""

    number: int
    #: (KV group, how many of the chunk's last tokens the object holds). After a hit, no step reads the other tokens.
    parts: tuple[tuple[KVGroup, int], ...]
    chunks: int = 0  # how many chunks at the end of a hit must have the object. 0 means all chunks

    def key(self, chunk: tuple[object, ...]) -> tuple[object, ...]:
        return (*chunk, self.number) if self.number else chunk

    def needed(self, hit: int) -> range:
        """Return the chunks that must have this object for a hit of `hit` chunks."""
        return range(max(0, hit - self.chunks) if self.chunks else 0, hit)


def kv_groups(options: Options) -> list[KVGroup]:
    size, larger = options.block_size, options.block_size * options.window_blocks
    windows = [KVGroup(number, larger, window) for number, window in enumerate(options.windows, start=1)]
    return [KVGroup(0, size), *windows, *[KVGroup(1, size, state=True)] * options.states]


def stored_objects(options: Options, windows: Sequence[int] = ()) -> list[StoredObject]:
    """Return the objects of a chunk, as KVLayerGroupsManager makes them (v1/kv_layer_groups.py 0.5.6:666).

    By default one object holds all KV groups. With `lmcache server --separate-object-groups`, KV groups whose windows
    have the same number of chunks share one object.
    windows: for each window, how many of its tokens LMCache keeps. Default: the whole window.
    """
    groups = kv_groups(options)
    chunk, kept = options.chunk_size, (0, *(windows or [group.kept for group in groups[1:]]))
    by_chunks: dict[int, list[KVGroup]] = {}
    for group in groups:
        chunks = -(-kept[group.number] // chunk) if options.separate_object_groups else 0
        by_chunks.setdefault(chunks, []).append(group)
    return [
        StoredObject(number, tuple((group, min(kept[group.number] or chunk, chunk)) for group in groups), chunks)
        for number, (chunks, groups) in enumerate(by_chunks.items())
    ]


def page_bytes(options: Options) -> int:
    """Return how many bytes the largest block of any KV group takes in one layer."""
    return options.block_size * options.window_blocks * byte_memory.SLOT


def kv_cache(options: Options, config: VllmConfig) -> specs.KVCacheConfig:
    """Return vLLM's KV cache configuration, with tensors only for AnyConnector and vLLM's offloading connectors."""
    shape: dict[str, Any] = {"num_kv_heads": options.heads_of_rank, "head_size": 32, "dtype": torch.float32}
    # as get_kv_cache_configs does (v1/core/kv_cache_utils.py 0.32.0:2585)
    retained = max(0, getattr(config, "num_prefill_lookahead_tokens", 0) - 1)
    extra = accepted(specs.SlidingWindowSpec, extra_retained_tokens=retained)
    if options.connector in OF_VLLM:  # all blocks have the same number of bytes, as in a hybrid model
        shape["page_size_padded"] = page_bytes(options)
    lab_groups = kv_groups(options)
    groups = [
        specs.KVCacheGroupSpec(
            [LAYER.format(group.number + number * len(lab_groups)) for number in range(options.layers)],
            _spec(group, options, **shape, **(extra if group.window else {})),
        )
        for group in lab_groups
    ]
    tensors = []
    if options.any_connector or options.connector in OF_VLLM or options.simple_offloading:  # LMCache reads no tensors
        page = groups[0].kv_cache_spec.page_size_bytes
        of_layer = page * options.num_blocks
        sizes = {"size": of_layer * options.layers, "layer_stride": of_layer, "block_stride": page}
        # all KV groups share the bytes, because a block belongs to only one KV group at a time
        tensors = [specs.KVCacheTensor(layers=group.layer_names, **sizes) for group in groups]
    return specs.KVCacheConfig(num_blocks=options.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def kv_caches(options: Options, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return {name of the first layer of each KV group: `memory`}. The first index of `memory` is the block number."""
    return {LAYER.format(group.number): memory for group in kv_groups(options)}


def _spec(group: KVGroup, options: Options, **shape: Any) -> specs.KVCacheSpec:
    if group.state:
        state = (group.block_size * byte_memory.FLOATS,)  # a page is as large as a page of full attention
        return specs.MambaSpec(
            block_size=group.block_size,
            shapes=(state,),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=options.drafts,
        )
    if group.window:
        return specs.SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **shape)
    return specs.FullAttentionSpec(block_size=options.block_of_rank, **shape)
