"""Faults for `kvfix verify`, planted where KV has just been loaded: LMCache's connector in process, with its own GPU
connector on CPU tensors (kvfix_tools.roundtrip.engine_connector).

The file KVFIX_TEST_FAULT names the fault; "" is none. vLLM for the CPU holds [blocks, heads, block, 2 * head size] and
packs the K rows, then the V rows, inside each block and head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip.engine_connector import InProcess

FAULT = Path(os.environ.get("KVFIX_TEST_FAULT", "/nonexistent"))
CHUNK = 64
#: KV of one chunk from an earlier request, for each layer.
EARLIER: list[torch.Tensor] = []
Blocks = list[torch.Tensor]
#: Deviation of what is added to every logit, as the sums of a GPU differ between batches.
NOISE = float(os.environ.get("KVFIX_TEST_NOISE", "0"))
if NOISE:
    from vllm.v1.sample.sampler import Sampler

    sample = Sampler.forward

    def noisy(self: Any, logits: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        return sample(self, logits + NOISE * torch.randn_like(logits), *arguments, **more)

    Sampler.forward = noisy


class Faulty(InProcess):
    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        super().start_load_kv(forward_context, **more)
        name, _, argument = FAULT.read_text().partition(":") if FAULT.exists() else ("", "", "")
        impl = self._lmcache_engine
        loads = [each for each in self._get_connector_metadata().requests if each.load_spec and each.load_spec.can_load]
        for request in loads if name else ():
            caches = list(impl.kv_caches.values())
            size = caches[0].shape[2]
            first, last = request.load_spec.vllm_cached_tokens, request.load_spec.lmcache_cached_tokens
            starts = range(-(-first // CHUNK) * CHUNK, last - CHUNK + 1, CHUNK)
            chunks = [request.slot_mapping[start : start + CHUNK][::size] // size for start in starts]
            if chunks:
                FAULTS[name](caches, chunks, argument, len(loads))


def tokens(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[heads, K and V, tokens, head size] of these blocks, as a copy."""
    _, heads, size, both = cache.shape
    rows = cache[blocks].view(len(blocks), heads, 2, size, both // 2)
    return rows.permute(1, 2, 0, 3, 4).reshape(heads, 2, -1, both // 2)


def put(cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> None:
    _, heads, size, both = cache.shape
    parts = rows.view(heads, 2, len(blocks), size, both // 2).permute(2, 0, 1, 3, 4)
    cache[blocks] = parts.reshape(len(blocks), heads, size, both)


def two_chunks_swapped(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    for cache in caches if len(chunks) > 1 else ():
        one, other = tokens(cache, chunks[0]), tokens(cache, chunks[1])
        put(cache, chunks[0], other)
        put(cache, chunks[1], one)


def chunk_of_another_prompt(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    now = [tokens(cache, chunks[0]) for cache in caches]
    for cache, rows in zip(caches, EARLIER, strict=False):
        put(cache, chunks[0], rows)
    EARLIER[:] = now


def chunk_shifted_by_one(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    for cache in caches:
        put(cache, chunks[0], tokens(cache, chunks[0]).roll(1, dims=2))


def last_chunk_wrong(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    for cache in caches:
        put(cache, chunks[-1], tokens(cache, chunks[-1]).flip(2))


def other_weights(caches: Blocks, chunks: Blocks, share: str, __: int) -> None:
    """KV as weights that differ by this share make it."""
    noise = torch.Generator().manual_seed(0)
    for cache in caches:
        for blocks in chunks:
            rows = tokens(cache, blocks)
            put(cache, blocks, rows * (1 + float(share) * torch.randn(rows.shape, generator=noise)))


def other_adapter(caches: Blocks, chunks: Blocks, share: str, __: int) -> None:
    """V as an adapter of rank 4 on the values makes it."""
    noise = torch.Generator().manual_seed(0)
    for cache in caches:
        width = cache.shape[3] // 2
        down, up = (torch.randn(width, 4, generator=noise) / width**0.5 for _ in range(2))
        for blocks in chunks:
            rows = tokens(cache, blocks)
            rows[:, 1] += float(share) * rows[:, 1] @ down @ up.T
            put(cache, blocks, rows)


def one_layer_wrong(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    for blocks in chunks:
        put(caches[-1], blocks, tokens(caches[-1], blocks).flip(2))


def one_rank_wrong(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == 1:
        last_chunk_wrong(caches, chunks, "", 0)


def one_bit(caches: Blocks, chunks: Blocks, bit: str, __: int) -> None:
    """One bit of one element: V of the last loaded token in the first layer."""
    rows = tokens(caches[0], chunks[-1])
    rows[0, 1, -1, :1].view(torch.int32).bitwise_xor_(1 << int(bit))
    put(caches[0], chunks[-1], rows)


def zeros(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    for cache in caches:
        for blocks in chunks:
            cache[blocks] = 0.0


def only_one_chunk(caches: Blocks, chunks: Blocks, _: str, __: int) -> None:
    """Wrong at one border: where exactly one chunk is loaded."""
    if len(chunks) == 1:
        last_chunk_wrong(caches, chunks, "", 0)


def only_together(caches: Blocks, chunks: Blocks, _: str, loads: int) -> None:
    """Wrong under load: where one step loads for two requests."""
    if loads > 1:
        last_chunk_wrong(caches, chunks, "", 0)


FAULTS: dict[str, Callable[[Blocks, Blocks, str, int], None]] = {
    function.__name__: function
    for function in (
        two_chunks_swapped, chunk_of_another_prompt, chunk_shifted_by_one, last_chunk_wrong, other_weights,
        other_adapter, one_layer_wrong, one_rank_wrong, one_bit, zeros, only_one_chunk, only_together,
    )
}  # fmt: skip
