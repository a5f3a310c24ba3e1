"""Replacements for the GPU and the copy thread of vLLM's SimpleCPUOffloadConnector (simple_kv_offload).

Its worker, the loop of its thread, and the computation of addresses are real. The lab replaces the driver's batched
copy, streams and events (offload_copies.py). The thread begins a copy at once, and the copy takes some steps.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.connectors.offload_copies import Copies, Event
from kvfix_tools.lab.connectors.offload_tiers import AtOnce
from kvfix_tools.roundtrip import cuda_stand_in


class _Event(Event):
    def __init__(self) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Record an event. stream: has the copies of its rank."""
        self._copies, self._copy = stream.copies, stream.copies.last


class _Torch(cuda_stand_in.Torch):
    """Replaces `torch` in the copy thread."""

    Event = _Event  # type: ignore[assignment]


class _Thread:
    """Replaces the copy thread: after its start, the queue runs its loop."""

    def __init__(self, target: Any, args: tuple[Any, ...], **_: Any) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        self._arguments[0].run = lambda: self._target(*self._arguments)


class CopyQueue(AtOnce):
    """Replaces the queue to the copy thread. An exception ends the thread."""

    copies: Copies
    died = False

    def put(self, item: Any) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        if self.died:
            return
        cuda_mem_ops._batch_memcpy = self.copies.batch, 0
        try:
            super().put(item)
        except Exception:  # noqa: BLE001 - as in a thread: no caller gets the exception
            self.died = True


@functools.cache
def stand_in() -> None:
    """Replace the GPU for all workers of this process."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    vars(worker).update(torch=cuda_stand_in.Torch(), PIN_MEMORY=False)
    vars(copy_backend).update(
        torch=_Torch(),
        current_platform=SimpleNamespace(set_device=lambda device: None),
        queue=SimpleNamespace(SimpleQueue=CopyQueue),
        threading=SimpleNamespace(Thread=_Thread),
    )
    cuda_mem_ops._batch_memcpy = None, 0
