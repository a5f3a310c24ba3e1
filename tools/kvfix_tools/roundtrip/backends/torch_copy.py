"""`torch`: gather on the device and copy to pinned memory on streams; on the CPU a plain gather. Needs torch alone.

It is the yardstick of the other backends and the reference way to write one. It indexes the engine's tensors by their
shape, and knows nothing of the arithmetic by which its work is checked (layout.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from kvfix_tools.roundtrip import region as regions
from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.cell_check import CellCheck, Transfer
from kvfix_tools.roundtrip.layout import Geometry
from kvfix_tools.roundtrip.region import Region

#: Host buffers, one for each chunk, outermost first: all layers of a token together.
HOST = "layer token kv head"
#: Chunks in flight, each with a stream and a staging buffer of its own.
IN_FLIGHT = 2


class StreamsInTurn:
    """`count` streams that run at the same time, between begin() and finish(). On the CPU all is done at once."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []
        self.device = device

    def begin(self) -> None:
        """What was submitted before comes first."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def take(self, number: int) -> Any:
        """Within it, work goes to stream `number` (modulo their count)."""
        return torch.cuda.stream(self.streams[number % len(self.streams)]) if self.streams else contextlib.nullcontext()

    def finish(self) -> None:
        """Wait for all of them."""
        for stream in self.streams:
            stream.synchronize()


class TorchCopy(Transfer):
    def __init__(self, check: CellCheck, tokens: int | None = None) -> None:
        """tokens: that there is host memory for; by default those of the cell."""
        self.geometry, self.chunk, device = check.geometry, int(check.cell.chunk), check.device
        tokens = tokens or check.cell.count
        self.host: Region = regions.host(self.geometry, HOST, self.chunk, tokens, device, check.cell.seed)
        self.operations = f"torch {torch.__version__}: index, index_put_, copy_ on {device.type}"
        self.layers = [paged(tensor, self.geometry) for tensor in layers(check.cache.typed(), self.geometry)]
        self.buffers = [rows.view(self.geometry.layers, -1, *self.layers[0].shape[2:]) for rows in self.host.tensors()]
        self.streams, self.staged = StreamsInTurn(device, IN_FLIGHT), device.type == "cuda"
        self.staging = (
            [torch.empty_like(self.buffers[0], device=device) for _ in range(IN_FLIGHT)] if self.buffers else []
        )

    def store(self, slots: torch.Tensor) -> None:
        self.streams.begin()
        for number, (buffer, part) in enumerate(zip(self.buffers, slots.split(self.chunk), strict=True)):
            with self.streams.take(number):
                self.gather(buffer, part, self.staging[number % IN_FLIGHT])
        self.streams.finish()

    def load(self, slots: torch.Tensor, skip: int) -> None:
        self.streams.begin()
        for number, (buffer, part) in enumerate(zip(self.buffers, slots.split(self.chunk), strict=True)):
            left_out = min(max(skip - number * self.chunk, 0), len(part))
            if left_out < len(part):
                with self.streams.take(number):
                    self.scatter(buffer, part, self.staging[number % IN_FLIGHT], left_out)
        self.streams.finish()

    def gather(self, buffer: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor) -> None:
        block, offset = slots // self.geometry.block, slots % self.geometry.block
        into = staging[:, : len(slots)] if self.staged else buffer
        for layer, tensor in enumerate(self.layers):
            into[layer] = tensor[block, offset]
        if self.staged:
            buffer.copy_(into, non_blocking=True)

    def scatter(self, buffer: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor, skip: int) -> None:
        slots = slots[skip:]
        block, offset = slots // self.geometry.block, slots % self.geometry.block
        held = buffer
        if self.staged:
            held = staging[:, : buffer.shape[1]]
            held.copy_(buffer, non_blocking=True)
        for layer, tensor in enumerate(self.layers):
            tensor[block, offset] = held[layer, skip:]


def layers(tensors: list[torch.Tensor], geometry: Geometry) -> list[torch.Tensor]:
    """The engine's tensor of each layer."""
    if not geometry.layout.one_tensor:
        return tensors
    return list(tensors[0].unbind(geometry.layout.axes.index("layer")))


def paged(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A layer as [blocks, block, K and V, heads, words]: a view. Words of 8 bytes: torch indexes no fp8 on the CPU."""
    words, heads, two = geometry.row_words, geometry.heads, geometry.planes
    held = tensor.view(torch.int64)
    name = geometry.layout.name
    if name in ("nhd", "one-tensor"):
        return held.permute(1, 2, 0, 3, 4)
    if name in ("nhd-block-first", "block-outermost"):
        return held.permute(0, 2, 1, 3, 4)
    if name == "hnd":
        return held.permute(1, 3, 0, 2, 4)
    if name == "hnd-block-first":
        return held.permute(0, 3, 1, 2, 4)
    if name in ("packed", "packed-pool"):
        return held.unflatten(3, (two, words)).permute(0, 1, 3, 2, 4)
    if name == "packed-hnd":
        return held.unflatten(3, (two, words)).permute(0, 2, 3, 1, 4)
    if name == "packed-cpu":
        return held.reshape(geometry.blocks, heads, two, geometry.block, words).permute(0, 3, 2, 1, 4)
    if name == "kv-inside":
        return held.unflatten(3, (heads, words))
    return held[:, :, None, None]


BACKENDS = (Backend("torch", "gather, and pinned copies on streams", TorchCopy),)
