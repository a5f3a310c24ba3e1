"""Streams, and the events by which one waits for another.

On a GPU they are CUDA's, and a slow one sleeps on the device. On the CPU they are a stand-in, queues of deferred work:
nothing runs until all has been submitted, then a slow stream runs only when no other can go on. So an event that is
missing is found every time, and never by chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: Clock cycles that a slow stream sleeps: tens of milliseconds, longer than what it races with.
SLEEP = 50_000_000
Work = Callable[[], Any]


class CudaStream:
    def __init__(self, device: torch.device, slow: bool = False) -> None:
        self.device, self.native = device, torch.cuda.Stream(device)
        self.kept: list[Work] = []  # and so the tensors in it: they must live until the device has read them
        if slow:
            with torch.cuda.stream(self.native):
                torch.cuda._sleep(SLEEP)

    def submit(self, work: Work, host: bool = False) -> None:
        """host: it is the host that does it, at once; it waits for what the stream waits for."""
        if host:
            self.native.synchronize()
            work()
            return
        self.kept.append(work)
        self.native.wait_stream(torch.cuda.current_stream(self.device))  # where its operands were made
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
class Event:
    """The stand-in's."""

    done: bool = False


@dataclass
class DeferredStream:
    """The stand-in on the CPU."""

    slow: bool
    queue: deque[Work | Event] = field(default_factory=deque)

    def submit(self, work: Work, host: bool = False) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event()
        self.queue.append(lambda: setattr(event, "done", True))
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event)

    def step(self) -> bool:
        """Do what is next; False if there is nothing, or it has to wait."""
        while self.queue and isinstance(self.queue[0], Event) and self.queue[0].done:
            self.queue.popleft()
        if not self.queue or isinstance(self.queue[0], Event):
            return False
        self.queue.popleft()()  # type: ignore[operator]
        return True


class Streams:
    """Those of one race. `events`: whether they wait for one another."""

    def __init__(self, device: torch.device, events: bool) -> None:
        self.device, self.events = device, events
        self.streams: list[Any] = []

    def stream(self, slow: bool = False) -> Any:
        """A new one."""
        stream = CudaStream(self.device, slow) if self.device.type == "cuda" else DeferredStream(slow)
        self.streams.append(stream)
        return stream

    def after(self, stream: Any, earlier: Any) -> None:
        """What `stream` does from here on comes after what `earlier` has so far: the event that a race turns on."""
        event = earlier.record()
        if self.events:
            stream.wait(event)

    def finish(self, until: Any = None) -> None:
        """Everything; or until nothing is left to do in this stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return
        order = sorted(self.streams, key=lambda stream: stream.slow)
        while (until is None or until.queue) and any(stream.step() for stream in order):
            pass
        if any(stream.queue for stream in ([until] if until else self.streams)):
            raise RuntimeError("streams that wait for one another")
