"""LMCache in process on the CPU as on a GPU, with faults for `kvfix verify` planted where KV has just been loaded.

LMCache's own GPU connector runs on CPU tensors (kvfix_tools.roundtrip.engine_connector). It gets KV as vLLM has it on a
GPU from 0.26 on: K and V of each token and head packed, heads inside of tokens. vLLM for the CPU holds K transposed and
then V in each block and head (float32), so a copy in the GPU's layout stands between the two.

K carries its position (RoPE), so rows of K and V that change places together change no answer: attention sums over
them. The faults therefore move K without V, or lose rows.

The file KVFIX_TEST_FAULT names the fault; "" is none.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip.engine_connector import InProcess

FAULT = Path(os.environ.get("KVFIX_TEST_FAULT", "/nonexistent"))
CHUNK = 64
#: KV of one chunk from an earlier request, for each layer.
EARLIER: list[torch.Tensor] = []
Tensors = list[torch.Tensor]
#: Deviation of what is added to every logit, as the sums of a GPU differ between batches.
NOISE = float(os.environ.get("KVFIX_TEST_NOISE", "0"))
if NOISE:
    from vllm.v1.sample.sampler import Sampler

    sample = Sampler.forward

    def noisy(self: Any, logits: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        return sample(self, logits + NOISE * torch.randn_like(logits), *arguments, **more)

    Sampler.forward = noisy


class Faulty(InProcess):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        from lmcache.integration.vllm import utils

        utils.try_get_vllm_kv_cache_layout = lambda *_: "NHD"
        super().__init__(*arguments, **more)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.engine = list(kv_caches.values())
        blocks, heads, size, both = self.engine[0].shape
        shape = (blocks, size, heads, both)
        self.packed = {name: cache.new_zeros(shape).transpose(1, 2) for name, cache in kv_caches.items()}
        super().register_kv_caches(self.packed)

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        requests = self._get_connector_metadata().requests
        loads = [each for each in requests if each.load_spec and each.load_spec.can_load]
        self.copy_out(each.slot_mapping for each in loads)
        super().start_load_kv(forward_context, **more)
        name, _, argument = FAULT.read_text().partition(":") if FAULT.exists() else ("", "", "")
        for request in loads if name else ():
            first, last = request.load_spec.vllm_cached_tokens, request.load_spec.lmcache_cached_tokens
            starts = range(-(-first // CHUNK) * CHUNK, last, CHUNK)
            chunks = [request.slot_mapping[start : min(last, start + CHUNK)] for start in starts]
            if chunks:
                FAULTS[name](list(self.packed.values()), chunks, argument, len(loads))
        for cache, packed, blocks in self.blocks(each.slot_mapping for each in loads):
            k, v = packed[blocks].chunk(2, dim=3)
            halves = [k.transpose(2, 3).flatten(2), v.flatten(2)]
            cache[blocks] = torch.cat(halves, dim=2).view(cache[blocks].shape)

    def wait_for_save(self) -> None:
        saved = [each for each in self._get_connector_metadata().requests if each.save_spec and each.save_spec.can_save]
        self.copy_out(each.slot_mapping for each in saved)
        super().wait_for_save()

    def copy_out(self, mappings: Iterable[torch.Tensor]) -> None:
        for cache, packed, blocks in self.blocks(mappings):
            _, heads, size, both = cache.shape
            k, v = cache[blocks].flatten(2).chunk(2, dim=2)
            k = k.reshape(-1, heads, both // 2, size).transpose(2, 3)
            packed[blocks] = torch.cat([k, v.reshape(-1, heads, size, both // 2)], dim=3)

    def blocks(self, mappings: Iterable[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The engine's tensor of each layer, the packed one, and the blocks of these slots."""
        slots = [mapping[mapping >= 0] for mapping in mappings]
        if slots:
            used = torch.unique(torch.cat(slots) // self.engine[0].shape[2])
            for cache, packed in zip(self.engine, self.packed.values(), strict=True):
                yield cache, packed, used


class Copied(Faulty):
    """The KV is in the GPU's layout when `wait_for_save` begins, as on a GPU."""

    def save_kv_layer(self, layer_name: str, *arguments: Any, **more: Any) -> None:
        super().save_kv_layer(layer_name, *arguments, **more)
        if layer_name == list(self.packed)[-1]:
            self.copy_out(each.slot_mapping for each in self._get_connector_metadata().requests)


def rows_of(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, K then V], as a copy."""
    return cache[slots // cache.shape[2], :, slots % cache.shape[2]]


def put(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = rows


def wrong_k(rows: torch.Tensor) -> torch.Tensor:
    """K of these tokens in reverse order, V as it was."""
    k, v = rows.chunk(2, dim=2)
    return torch.cat([k.flip(0), v], dim=2)


def two_chunks_swapped(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    """Changes the order of a sum, and so the last bits only."""
    for cache in caches if len(chunks) > 1 and len(chunks[1]) == CHUNK else ():
        one, other = rows_of(cache, chunks[0]), rows_of(cache, chunks[1])
        put(cache, chunks[0], other)
        put(cache, chunks[1], one)


def k_of_two_chunks_swapped(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    for cache in caches if len(chunks) > 1 and len(chunks[1]) == CHUNK else ():
        one, other = rows_of(cache, chunks[0]), rows_of(cache, chunks[1])
        width = one.shape[2] // 2
        put(cache, chunks[0], torch.cat([other[:, :, :width], one[:, :, width:]], dim=2))
        put(cache, chunks[1], torch.cat([one[:, :, :width], other[:, :, width:]], dim=2))


def chunk_of_another_prompt(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    if len(chunks[0]) == CHUNK:
        now = [rows_of(cache, chunks[0]) for cache in caches]
        for cache, rows in zip(caches, EARLIER, strict=False):
            put(cache, chunks[0], rows)
        EARLIER[:] = now


def chunk_shifted_by_one(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    for cache in caches:
        rows = rows_of(cache, chunks[0])
        put(cache, chunks[0], torch.cat([rows[:1], rows[:-1]]))


def last_chunk_wrong(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    for cache in caches:
        put(cache, chunks[-1], wrong_k(rows_of(cache, chunks[-1])))


def last_partial_chunk_wrong(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    if len(chunks[-1]) < CHUNK:
        last_chunk_wrong(caches, chunks, "", 0)


def other_weights(caches: Tensors, chunks: Tensors, share: str, __: int) -> None:
    """KV as weights that differ by this share make it."""
    noise = torch.Generator().manual_seed(0)
    for cache in caches:
        rows = rows_of(cache, torch.cat(chunks))
        put(cache, torch.cat(chunks), rows * (1 + float(share) * torch.randn(rows.shape, generator=noise)))


def other_adapter(caches: Tensors, chunks: Tensors, share: str, __: int) -> None:
    """V as an adapter of rank 4 on the values makes it."""
    noise = torch.Generator().manual_seed(0)
    for cache in caches:
        width = cache.shape[3] // 2
        down, up = (torch.randn(width, 4, generator=noise) / width**0.5 for _ in range(2))
        rows = rows_of(cache, torch.cat(chunks))
        rows[:, :, width:] += float(share) * rows[:, :, width:] @ down @ up.T
        put(cache, torch.cat(chunks), rows)


def one_layer_wrong(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    put(caches[-1], torch.cat(chunks), wrong_k(rows_of(caches[-1], torch.cat(chunks))))


def one_rank_wrong(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == 1:
        last_chunk_wrong(caches, chunks, "", 0)


def one_bit(caches: Tensors, chunks: Tensors, bit: str, __: int) -> None:
    """One bit of one element: V of the first loaded token, in the first layer and head."""
    rows = rows_of(caches[0], chunks[0])
    rows[0, 0, -1:].view(torch.int32).bitwise_xor_(1 << int(bit))
    put(caches[0], chunks[0], rows)


def zeros(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    for cache in caches:
        put(cache, torch.cat(chunks), torch.zeros(()))


def only_one_chunk(caches: Tensors, chunks: Tensors, _: str, __: int) -> None:
    """Wrong at one border: where exactly one chunk is loaded."""
    if len(chunks) == 1:
        last_chunk_wrong(caches, chunks, "", 0)


def only_together(caches: Tensors, chunks: Tensors, _: str, loads: int) -> None:
    """Wrong under load: where one step loads for two requests."""
    if loads > 1:
        last_chunk_wrong(caches, chunks, "", 0)


FAULTS: dict[str, Callable[[Tensors, Tensors, str, int], None]] = {
    function.__name__: function
    for function in (
        two_chunks_swapped, k_of_two_chunks_swapped, chunk_of_another_prompt, chunk_shifted_by_one, last_chunk_wrong,
        last_partial_chunk_wrong,
        other_weights, other_adapter, one_layer_wrong, one_rank_wrong, one_bit, zeros, only_one_chunk, only_together,
    )
}  # fmt: skip
