"""The reference backend `torch` indexes tensors by their shape, without the row arithmetic of region.py."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.cell_check import CellCheck, Transfer
from kvfix_tools.roundtrip.layout import Geometry
from kvfix_tools.roundtrip.region import Region

#: Axes of a host buffer, outermost first. Each chunk has its own buffer.
HOST = "layer token kv head"
IN_FLIGHT = 2  # number of chunks in flight, each with its own stream and staging buffer
#: A slow stream sleeps for this number of clock cycles (tens of milliseconds), longer than other streams work.
SLEEP = 50_000_000
Work = Callable[[], Any]
#: {layout: order into which `paged` permutes the axes of a layer}
ORDERS = {
    **dict.fromkeys(("nhd", "one-tensor"), (1, 2, 0, 3, 4)),
    **dict.fromkeys(("nhd-block-first", "block-outermost"), (0, 2, 1, 3, 4)),
    **dict.fromkeys(("packed", "packed-pool"), (0, 1, 3, 2, 4)),
    "hnd": (1, 3, 0, 2, 4), "hnd-block-first": (0, 3, 1, 2, 4), "packed-hnd": (0, 2, 3, 1, 4),
    "packed-cpu": (0, 3, 2, 1, 4), "kv-inside": (0, 1, 2, 3, 4),
}  # fmt: skip


class CudaStream:
    def __init__(self, device: torch.device, slow: bool = False) -> None:
        self.device, self.native = device, torch.cuda.Stream(device)
        self.kept: list[Work] = []  # keeps the tensors of the work until the device has read them
        if slow:
            with torch.cuda.stream(self.native):
                torch.cuda._sleep(SLEEP)

    def submit(self, work: Work, host: bool = False) -> None:
        """Submit work. host: True to wait for all earlier work of the stream, and then run this work on the host."""
        if host:
            self.native.synchronize()
            work()
            return
        self.kept.append(work)
        self.native.wait_stream(torch.cuda.current_stream(self.device))  # the current stream wrote the operands
        with torch.cuda.stream(self.native):
            work()

    def record(self) -> Any:
        return self.native.record_event()

    def wait(self, event: Any) -> None:
        self.native.wait_event(event)

    def synchronize(self) -> None:
        self.native.synchronize()
        self.kept.clear()


class TorchCopy(Transfer):
    def __init__(self, check: CellCheck, tokens: int = 0) -> None:
        """tokens: make host buffers for this number of tokens (0: all tokens of the cell)."""
        self.block, self.chunk, device = check.geometry.block, int(check.cell.chunk), check.device
        self.host: Region = check.host(HOST, tokens)
        self.operations = f"torch {torch.__version__}: index, index_put_, copy_ on {device.type}"
        self.layers = [paged(tensor, check.geometry) for tensor in layers(check.cache.typed(), check.geometry)]
        self.buffers = [rows.view(len(self.layers), -1, *self.layers[0].shape[2:]) for rows in self.host.tensors()]
        in_flight = range(IN_FLIGHT if device.type == "cuda" else 0)
        self.streams = [CudaStream(device) for _ in in_flight]
        self.staging = [torch.empty_like(self.buffers[0], device=device) for _ in in_flight]

    def store(self, slots: torch.Tensor) -> None:
        self.run(partial(self.gather, number, part) for number, part in enumerate(slots.split(self.chunk)))

    def load(self, slots: torch.Tensor, skip: int) -> None:
        chunks = enumerate(slots.split(self.chunk))
        left_out = [(number, part, max(skip - number * self.chunk, 0)) for number, part in chunks]
        self.run(partial(self.scatter, number, part, out) for number, part, out in left_out if out < len(part))

    def gather(self, number: int, slots: torch.Tensor) -> None:
        """Copy the KV of these slots to host buffer `number`."""
        block, offset, buffer = slots // self.block, slots % self.block, self.buffers[number]
        into = self.staging[number % IN_FLIGHT][:, : len(slots)] if self.staging else buffer
        for layer, tensor in enumerate(self.layers):
            into[layer] = tensor[block, offset]
        if self.staging:
            buffer.copy_(into, non_blocking=True)

    def scatter(self, number: int, slots: torch.Tensor, skip: int) -> None:
        held = self.buffers[number]
        if self.staging:
            held = self.staging[number % IN_FLIGHT][:, : len(slots)]
            held.copy_(self.buffers[number], non_blocking=True)
        block, offset = slots[skip:] // self.block, slots[skip:] % self.block
        for layer, tensor in enumerate(self.layers):
            tensor[block, offset] = held[layer, skip:]

    def run(self, work: Iterable[Work]) -> None:
        """Run the work of the chunks on the streams in turn, and wait for all streams. On the CPU, use no streams."""
        for number, each in enumerate(work):
            if self.streams:
                self.streams[number % IN_FLIGHT].submit(each)
            else:
                each()
        for stream in self.streams:
            stream.synchronize()


def layers(tensors: list[torch.Tensor], geometry: Geometry) -> list[torch.Tensor]:
    if not geometry.layout.one_tensor:
        return tensors
    return list(tensors[0].unbind(geometry.layout.axes.index("layer")))


def paged(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """View a layer as int64 words [blocks, slots, planes, heads, words], because torch cannot index fp8 on the CPU."""
    name, held = geometry.layout.name, tensor.view(torch.int64)
    words, heads, two = geometry.row_words, geometry.heads, geometry.planes
    if name == "mla":
        return held[:, :, None, None]
    if name == "packed-cpu":
        held = held.reshape(geometry.blocks, heads, two, geometry.block, words)
    elif name == "kv-inside":
        held = held.unflatten(3, (heads, words))
    elif name.startswith("packed"):
        held = held.unflatten(3, (two, words))
    return held.permute(ORDERS[name])


BACKENDS = (Backend("torch", "PyTorch: gather on the device, then copy to pinned memory on streams", TorchCopy),)
