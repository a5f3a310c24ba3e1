"""KV cache tensors in vLLM's layout, whose elements the lab can check. The lab's slots are stored in the tensors.

The content of a slot (memory.py) has eight bytes. Element i of the slot holds byte (i modulo 8) of the content, XORed
with a mark for the layer and the element. So the lab detects K in place of V, KV of another layer, a partly copied
slot, and a wrong offset. Each element is a whole number up to 255, which any 16-bit float can hold.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvfix_tools.lab.engine.memory import GARBAGE, Block

_BYTES = 8


class TensorMemory:
    """The tensors of one rank. kv_caches: {layer: [blocks, heads, slots, elements]}, as a connector gets them.

    The lab's model computes only the first layer, after `begin`. `go_on` repeats the reads and writes in later layers.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.kv_caches: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
        # layer i of each KV group uses the same bytes as layer i of the first KV group (allocate_kv_cache)
        names = config.kv_cache_groups[0].layer_names
        self._arrays = [self.kv_caches[name].numpy() for name in names]
        elements = self._arrays[0].shape[-1]
        self._marks = list(numpy.random.default_rng(7).integers(0, 256, (len(names), elements), dtype=numpy.uint8))
        #: contents[block]: contents of the block's slots in the current layer
        self.contents: list[list[int]] = []
        self._layer = 0
        #: The step's reads and writes in the first layer: (block, first slot, contents, True for a write).
        self.done: list[tuple[int, int, list[int], bool]] = []
        for block in range(config.num_blocks):
            self.poison(block)
        self.begin()

    @property
    def blocks(self) -> "list[TensorBlock]":
        return [TensorBlock(self, block) for block in range(len(self._arrays[0]))]

    def layers(self) -> range:
        return range(len(self._arrays))

    def poison(self, block: int) -> None:
        """Fill the block with garbage in all layers."""
        for array in self._arrays:
            array[block] = 0

    def begin(self) -> None:
        self.done.clear()
        self._look(0)

    def go_on(self, layer: int) -> set[int]:
        """Compute this layer. Return the blocks whose KV in this layer differs from the KV read in the first layer."""
        self._look(layer)
        wrong = set()
        for block, start, contents, written in self.done:
            if written:
                self.put(block, start, contents)
            elif self.contents[block][start : start + len(contents)] != contents:
                wrong.add(block)
        return wrong

    def put(self, block: int, start: int, contents: Sequence[int]) -> None:
        self.contents[block][start : start + len(contents)] = contents
        array, mark = self._arrays[self._layer], self._marks[self._layer]
        array[block, :, start : start + len(contents)] = _encoded(numpy.array(contents, dtype=numpy.int64), mark)

    def _look(self, layer: int) -> None:
        self._layer = layer
        array, mark = self._arrays[layer], self._marks[layer]
        with numpy.errstate(invalid="ignore"):
            content = (array[:, 0, :, :_BYTES].astype(numpy.uint8) ^ mark[:_BYTES]).view(numpy.int64)[..., 0]
        right = (_encoded(content, mark)[:, None] == array).all(axis=(1, 3))
        self.contents = numpy.where(right, content, GARBAGE).tolist()


def _encoded(contents: Any, mark: Any) -> Any:
    parts = numpy.ascontiguousarray(contents)[..., None].view(numpy.uint8)
    return (numpy.tile(parts, len(mark) // _BYTES) ^ mark).astype(numpy.float32)


class TensorBlock(Block):
    def __init__(self, memory: TensorMemory, block: int) -> None:
        self._memory = memory
        self._block = block

    def __len__(self) -> int:
        return len(self._memory.contents[self._block])

    def __getitem__(self, place: slice) -> list[int]:
        contents = self._memory.contents[self._block][place]
        self._memory.done.append((self._block, place.start or 0, contents, False))
        return contents

    def __setitem__(self, place: slice, contents: Sequence[int]) -> None:
        start = place.start or 0
        self._memory.done.append((self._block, start, list(contents), True))
        self._memory.put(self._block, start, contents)
