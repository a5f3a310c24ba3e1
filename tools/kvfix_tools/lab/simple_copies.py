"""In place of a GPU and of the copy thread in the worker of vLLM's SimpleCPUOffloadConnector (simple_kv_offload).

Real: its worker, the loop of its thread, and what gives each copy its addresses. Stand-ins: the driver's batched copy,
streams and events (offload_copies.py). What the thread is handed it does at once; the copy takes some steps.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.offload_copies import Copies, Event
from kvfix_tools.roundtrip import cuda_stand_in


class _Event(Event):
    def __init__(self) -> None: ...

    def record(self, stream: Any = None) -> None:
        """stream: with the copies of its rank."""
        self._copies, self._copy = stream.copies, stream.copies.last


class _Torch(cuda_stand_in.Torch):
    """`torch` for the copy thread."""

    Event = _Event  # type: ignore[assignment]


class _Thread:
    """In place of the copy thread: from its start on, its queue runs what it would run."""

    def __init__(self, target: Any, args: tuple[Any, ...], **_: Any) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        self._arguments[0].run = lambda: self._target(*self._arguments)


class CopyQueue:
    """In place of the queue to that thread: its loop runs for what is put in. An exception ends it."""

    run: Any
    copies: Copies

    def __init__(self) -> None:
        self._items: list[Any] = []
        self.died = False

    def put(self, item: Any) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        if item is None or self.died:
            return
        self._items = [item, None]
        cuda_mem_ops._batch_memcpy = self.copies.batch, 0
        try:
            self.run()
        except Exception:  # noqa: BLE001 - as in a thread: it is printed, and nobody hears of it
            self.died = True

    def get(self) -> Any:
        return self._items.pop(0)


@functools.cache
def stand_in() -> None:
    """For all workers of the process: they find no GPU."""
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops, worker

    vars(worker).update(torch=cuda_stand_in.Torch(), PIN_MEMORY=False)
    vars(copy_backend).update(
        torch=_Torch(),
        current_platform=SimpleNamespace(set_device=lambda device: None),
        queue=SimpleNamespace(SimpleQueue=CopyQueue),
        threading=SimpleNamespace(Thread=_Thread),
    )
    cuda_mem_ops._batch_memcpy = None, 0
