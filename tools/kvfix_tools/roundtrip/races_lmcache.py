"""The races with LMCache's connectors V2 and V3 in place of the tool's own copy.

What waits is LMCache: a store or a load has been done when it returns. On a GPU its streams are those of the race. On
the CPU they are the stand-in's: what LMCache gives to its operations is deferred, and its `synchronize` lets it run;
with the events taken out it does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends.lmcache import Connector, connectors
from kvfix_tools.roundtrip.cell_check import Refused
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.races import Race
from kvfix_tools.roundtrip.streams import Streams


class Stream(cuda_stand_in.Stream):
    """A deferred stream as LMCache sees it."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self.streams, self.stream = streams, stream

    def synchronize(self) -> None:
        if self.streams.events:
            self.streams.finish(self.stream)


class ConnectorRace(Race):
    def __init__(self, cell: Cell, device: torch.device, events: bool) -> None:
        if device.type == "cuda" and not events:
            raise Refused("what LMCache waits for cannot be taken out of it on a GPU")
        super().__init__(cell, device, events)

    def transfer(self) -> Any:
        """Without its buffer on the device, from which it copies at once."""
        connector = Connector(self.cell.backend.partition("-")[2], self, buffer=False)
        self.result.operations = f"{connector.operations.partition(',')[0]}, its {self.result.operations}"
        assert connector.host is not None
        return connector

    def store(self, stream: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self._runs_on(stream):
            self.copy.store(self.source)

    def load(self, stream: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self._runs_on(stream):
            self.copy.load(self.target, 0)

    @contextlib.contextmanager
    def _runs_on(self, stream: Any) -> Iterator[None]:
        """LMCache's streams are this one, and its operations are submitted to it."""
        connector, module = self.copy.connector, connectors(self.device.type)
        if self.device.type == "cuda":
            connector.store_stream = connector.load_stream = stream.native
            yield
            return
        connector.store_stream = connector.load_stream = Stream(self.streams, stream)
        operations = getattr(module, "device_ops", None) or module.lmc_ops
        transfer = operations.multi_layer_kv_transfer

        def submit(*arguments: Any, **more: Any) -> None:
            stream.submit(partial(transfer, *arguments, **more))

        with mock.patch.object(operations, "multi_layer_kv_transfer", submit):
            yield
