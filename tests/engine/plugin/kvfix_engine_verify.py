"""Run LMCache in process on the CPU, and plant faults in loaded KV, for the tests of `kvfix verify`.

LMCache's GPU connector runs on CPU tensors in the GPU layout of vLLM 0.26 and later: [tokens, heads, K then V]. For
each head of a block, vLLM for the CPU stores K as [values, tokens], and then V as [tokens, values]. So this module
copies KV between the two layouts. K includes the token's position (RoPE), so answers stay equal if K and V of two
tokens are swapped together. To change answers, a fault that swaps tokens swaps only K or only V.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from kvfix_tools.roundtrip.engine_connector import InProcess

FAULT = Path(os.environ.get("KVFIX_TEST_FAULT", "/nonexistent"))
CHUNK = 64
#: The fault `chunk_of_another_prompt` keeps here the first loaded chunk of the previous request.
EARLIER: list[torch.Tensor] = []
#: Standard deviation of noise to add to every logit. The noise imitates a GPU, whose logits differ between batches.
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
        loads = [each for each in self._get_connector_metadata().requests if each.load_spec and each.load_spec.can_load]
        self.copy_out(each.slot_mapping for each in loads)
        super().start_load_kv(forward_context, **more)
        name, _, argument = FAULT.read_text().partition(":") if FAULT.exists() else ("", "", "")
        for request in loads if name else ():
            first = -(-request.load_spec.vllm_cached_tokens // CHUNK) * CHUNK
            slots = request.slot_mapping[first : request.load_spec.lmcache_cached_tokens]
            if len(slots):
                size = self.engine[0].shape[2]
                rows = slots // size, slice(None), slots % size
                layers = [cache[rows].chunk(2, dim=2) for cache in self.packed.values()]
                kv = torch.stack([torch.stack(each) for each in layers], dim=1)
                plant(name, kv, argument or str(len(loads)))
                for cache, layer in zip(self.packed.values(), kv.unbind(1), strict=True):
                    cache[rows] = torch.cat([*layer], dim=2)
        for cache, packed, blocks in self.blocks(each.slot_mapping for each in loads):
            k, v = packed[blocks].chunk(2, dim=3)
            cache[blocks] = torch.cat([k.transpose(2, 3).flatten(2), v.flatten(2)], dim=2).view(cache[blocks].shape)

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
        """Yield (engine's tensor, tensor in the GPU layout, blocks of the slots) for each layer."""
        slots = [mapping[mapping >= 0] for mapping in mappings]
        if slots:
            used = torch.unique(torch.cat(slots) // self.engine[0].shape[2])
            for cache, packed in zip(self.engine, self.packed.values(), strict=True):
                yield cache, packed, used


class Copied(Faulty):
    """A `Faulty` connector that copies the KV into the GPU layout before `wait_for_save` begins."""

    def save_kv_layer(self, layer_name: str, *arguments: Any, **more: Any) -> None:
        super().save_kv_layer(layer_name, *arguments, **more)
        if layer_name == list(self.packed)[-1]:
            self.copy_out(each.slot_mapping for each in self._get_connector_metadata().requests)


def plant(fault: str, kv: torch.Tensor, argument: str) -> None:
    tokens = kv.shape[2]
    chunks = [slice(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]
    if fault not in SOMETIMES:
        FAULTS[fault](kv, chunks, argument)
    elif SOMETIMES[fault](chunks, argument):
        FAULTS["last_chunk_wrong"](kv, chunks, "")


def is_whole(chunk: slice) -> bool:
    return chunk.stop - chunk.start == CHUNK


def two_chunks_swapped(kv: torch.Tensor, chunks: list[slice], _: str = "") -> None:
    """Swap two chunks, K and V together. Attention sums in another order, so the result changes by rounding only."""
    if len(chunks) > 1 and is_whole(chunks[1]):
        one, other = (kv[:, :, chunk].clone() for chunk in chunks[:2])
        kv[:, :, chunks[0]], kv[:, :, chunks[1]] = other, one


def chunk_of_another_prompt(kv: torch.Tensor, chunks: list[slice], _: str) -> None:
    if is_whole(chunks[0]):
        now = kv[:, :, chunks[0]].clone()
        kv[:, :, chunks[0]] = EARLIER[0] if EARLIER else now
        EARLIER[:] = [now]


def chunk_shifted_by_one(kv: torch.Tensor, chunks: list[slice], _: str) -> None:
    first = kv[:, :, chunks[0]]
    first[:, :, 1:] = first[:, :, :-1].clone()


def other_adapter(kv: torch.Tensor, _: list[slice], share: str) -> None:
    """Change V as a LoRA adapter of rank 4 on the value projection does."""
    noise = torch.Generator().manual_seed(0)
    for v in kv[1]:
        width = v.shape[-1]
        down, up = (torch.randn(width, 4, generator=noise) / width**0.5 for _ in range(2))
        v += float(share) * v @ down @ up.T


#: Each function changes the loaded `kv` [K and V, layers, tokens, ...] in place. The last argument is the text after
#: `NAME:` in the file FAULT. Without a text, the argument is the number of requests for which the step loads.
FAULTS: dict[str, Callable[[torch.Tensor, list[slice], str], Any]] = {
    "two_chunks_swapped": two_chunks_swapped,
    "k_of_two_chunks_swapped": lambda kv, chunks, _: two_chunks_swapped(kv[:1], chunks),
    "chunk_of_another_prompt": chunk_of_another_prompt,
    "chunk_shifted_by_one": chunk_shifted_by_one,
    # the last chunk's tokens are in reverse order in K, but not in V
    "last_chunk_wrong": lambda kv, chunks, _: kv[0, :, chunks[-1]].copy_(kv[0, :, chunks[-1]].flip(1)),
    "other_weights": lambda kv, _, share: kv.mul_(
        1 + float(share) * torch.randn(kv.shape, generator=torch.Generator().manual_seed(0))
    ),
    "other_adapter": other_adapter,
    "one_layer_wrong": lambda kv, *_: kv[0, -1].copy_(kv[0, -1].flip(0)),
    # one bit of one element flips: V of the first loaded token, in the first layer and head
    "one_bit": lambda kv, _, bit: kv[1, 0, 0, 0, -1:].view(torch.int32).bitwise_xor_(1 << int(bit)),
    "v_of_one_token_wrong": lambda kv, chunks, _: kv[1, 0, chunks[1].start + 5].copy_(kv[1, 0, chunks[1].start + 6]),
    "not_a_number": lambda kv, chunks, _: kv[1, 1, chunks[2].start + 7].view(-1)[0].fill_(float("nan")),
    "zeros": lambda kv, *_: kv.zero_(),
}
#: {fault: condition on all arguments of a fault except `kv`}. If true, the fault acts as `last_chunk_wrong`.
SOMETIMES: dict[str, Callable[[list[slice], str], bool]] = {
    "last_partial_chunk_wrong": lambda chunks, _: not is_whole(chunks[-1]),
    "one_rank_wrong": lambda *_: get_tensor_model_parallel_rank() == 1,
    "only_one_chunk": lambda chunks, _: len(chunks) == 1,  # a bug that shows only if exactly one chunk is loaded
    "only_together": lambda _, loads: int(loads) > 1,  # a bug that shows only if one step loads for two requests
}
