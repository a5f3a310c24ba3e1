"""What is written for CUDA, as far as it runs without: streams and staging buffers. `torch.cuda` is stood in for;
that a GPU does the same is not shown by this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfix_tools.roundtrip import cuda_stand_in, streams
from kvfix_tools.roundtrip.backends.torch_copy import IN_FLIGHT, StreamsInTurn, TorchCopy
from kvfix_tools.roundtrip.cell_check import CellCheck
from kvfix_tools.roundtrip.matrix import Cell

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recorded(cuda_stand_in.Stream):
    """A stream that keeps what is asked of it."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[str] = []

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def wait_stream(self, other: Any) -> None:
        self.asked.append("wait_stream")

    def wait_event(self, event: Any) -> None:
        self.asked.append("wait_event")

    def record_event(self) -> str:
        self.asked.append("record_event")
        return "event"


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Recorded)
    monkeypatch.setattr(torch.cuda, "stream", cuda_stand_in.CUDA.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)


@pytest.mark.parametrize("layout", ["nhd", "packed-hnd", "mla", "block-outermost"])
@pytest.mark.parametrize("skip", ["none", "chunk"])
def test_through_staging_buffers(layout: str, skip: str) -> None:
    check = CellCheck(Cell("torch", layout=layout, skip=skip), CPU)
    copy = TorchCopy(check)
    copy.staged, copy.streams = True, StreamsInTurn(CUDA, IN_FLIGHT)
    result = check.run(copy)
    assert [str(finding) for finding in result.findings] == []
    for stream in copy.streams.streams:  # a store and two loads, each after what was submitted before and to its end
        assert stream.asked == ["wait_stream", "synchronize"] * 3


def test_a_staging_buffer_that_is_shared_by_mistake_is_seen() -> None:
    """What is left in it from the chunk before goes to the host."""

    class Stale(TorchCopy):
        def gather(self, buffer: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor) -> None:
            if len(slots) == self.chunk:
                super().gather(buffer, slots, staging)
            else:
                buffer.copy_(staging[:, : len(slots)])

    check = CellCheck(Cell("torch"), CPU)
    copy = Stale(check)
    copy.staged = True
    assert set(check.run(copy).findings[0].classes) == {"wrong slot"}


def test_what_the_host_does_waits_for_what_its_stream_waits_for() -> None:
    """A stream does not keep the host from writing to a buffer that it still reads."""
    stream, done = streams.CudaStream(CUDA, slow=False), list[str]()
    stream.wait(streams.Event("event"))
    stream.submit(lambda: done.extend(stream.native.asked), host=True)
    assert done == ["wait_event", "synchronize"]


def test_a_stream_of_a_race_is_one_of_cuda() -> None:
    """Its work comes after that of the current stream, where its operands were made, and they live until its end."""
    slow, other = streams.CudaStream(CUDA, slow=True), streams.CudaStream(CUDA, slow=False)
    done: list[str] = []
    slow.submit(lambda: done.append("slow"))
    other.wait(slow.record())
    other.submit(lambda: done.append("other"))
    assert done == ["slow", "other"]
    assert slow.native.asked == ["wait_stream", "record_event"]
    assert other.native.asked == ["wait_event", "wait_stream"]
    assert len(slow.kept) == len(other.kept) == 1
