"""Streams of a device, taken in turn. On the CPU everything is done at once, in order."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Streams:
    """`count` streams that run beside one another, between begin() and finish()."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []
        self.device = device

    def begin(self) -> None:
        """What was submitted before comes first."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def take(self, number: int) -> Any:
        """Within it, work goes to stream `number` (modulo their count)."""
        if not self.streams:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.streams[number % len(self.streams)])

    def finish(self) -> None:
        """Wait for all of them."""
        for stream in self.streams:
            stream.synchronize()
