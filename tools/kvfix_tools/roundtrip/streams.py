"""Streams, and the events by which a stream waits for another stream.

On a GPU they are CUDA streams, and a slow stream sleeps on the device. On the CPU they are a stand-in: queues of
deferred work. No work runs until all work is submitted, and a slow stream runs only if no other stream can. So a
missing event is always found.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch

#: Clock cycles that a slow stream sleeps: tens of milliseconds, longer than the work of other streams.
SLEEP = 50_000_000
Work = Callable[[], Any]


class CudaStream:
    def __init__(self, device: torch.device, slow: bool = False) -> None:
        self.device, self.native = device, torch.cuda.Stream(device)
        self.kept: list[Work] = []  # keeps tensors alive until the device has read them
        if slow:
            with torch.cuda.stream(self.native):
                torch.cuda._sleep(SLEEP)

    def submit(self, work: Work, host: bool = False) -> None:
        """Submit work. host: wait for all earlier work of the stream, then run this work on the host."""
        if host:
            self.native.synchronize()
            work()
            return
        self.kept.append(work)
        self.native.wait_stream(torch.cuda.current_stream(self.device))  # the current stream made the operands
        with torch.cuda.stream(self.native):
            work()

    def record(self) -> Any:
        return self.native.record_event()

    def wait(self, event: Any) -> None:
        self.native.wait_event(event)

    def synchronize(self) -> None:
        self.native.synchronize()
        self.kept.clear()


@dataclass
class DeferredStream:
    """A stream of the stand-in on the CPU. Work that returns False stays in the queue, because it must wait."""

    slow: bool
    queue: deque[Work] = field(default_factory=deque)

    def submit(self, work: Work, host: bool = False) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.queue.append(event.set)
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event.is_set)

    def step(self) -> bool:
        """Do the next work. Return False if there is none, or if the stream must wait."""
        if not self.queue or self.queue[0]() is False:
            return False
        self.queue.popleft()
        return True
