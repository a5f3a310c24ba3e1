"""`lmcache-mp`: the block transfer of LMCache's multi-process mode, as vLLM's worker calls it. Whole chunks only.

LMCache issue 4463 says that this mode is not affected: it shows what `lmcache-v2` should make of the packed layout.
"""

from __future__ import annotations

import torch

from kvfix_tools.roundtrip.backends import Backend, lmcache
from kvfix_tools.roundtrip.backends.vllm_offload import block_ids
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer
from kvfix_tools.roundtrip.region import Region

#: A chunk, outermost first; K and V packed in one axis stay so (0.5.6 torch_ops/mp_mem_kernels.py:283).
SPLIT, FUSED = "kv layer token head", "layer token head kv"
AXES = {
    "layout": lmcache.LAYOUTS,
    "tokens": ("chunk", "512"),  # one chunk, and two or more of any size
    "block": ("16", "32"),
    "chunk": ("32", "64", "128", "256"),
    "slots": ("blocks", "contiguous"),
    "skip": ("none",),
}


class BlockTransfer(Transfer):
    def __init__(self, check: CellCheck) -> None:
        lmcache.connectors(check.device.type)
        try:
            from lmcache.v1.multiprocess.transfer_context import base
        except ImportError as error:
            raise Refused("this LMCache has another multi-process mode") from error
        (geometry, layers), chunk = lmcache.as_vllm(check), int(check.cell.chunk)
        self.block, self.per_chunk = geometry.block, chunk // geometry.block
        if chunk % geometry.block or check.cell.count % chunk:
            raise Refused("whole chunks of whole blocks only")
        self.gather, self.scatter = base.gather_paged_kv_to_cpu, base.scatter_cpu_to_paged_kv
        self.caches = {str(layer): tensor for layer, tensor in enumerate(layers)}
        self.host: Region = check.host(FUSED if geometry.layout.fused else SPLIT)
        width, planes = geometry.planes * geometry.heads * geometry.head_size, [geometry.layers, chunk]
        shape = [*planes, width] if geometry.planes == 1 or geometry.layout.fused else [2, *planes, width // 2]
        self.chunks = [rows.view(geometry.dtype).view(shape) for rows in self.host.tensors()]
        self.hints = lmcache.hints(geometry)
        self.operations = lmcache.operations(check.device, "multi_layer_block_kv_transfer")

    def store(self, slots: torch.Tensor) -> None:
        self.gather(self.caches, block_ids(slots, self.block), self.per_chunk, out=self.chunks, layout_hints=self.hints)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        ids = block_ids(slots, self.block)
        self.scatter(self.caches, ids, self.chunks, self.per_chunk, skip_first_n_tokens=skip, layout_hints=self.hints)


SUMMARY = "the block transfer of LMCache's multi-process mode"
BACKENDS = (Backend("lmcache-mp", SUMMARY, BlockTransfer, lmcache.missing, "lmcache", AXES),)
