"""The races with LMCache's connectors V2 and V3 in place of the tool's own copy.

What waits is LMCache: a store or a load has been done when it returns. On a GPU its streams are those of the lanes. On
the CPU they are the stand-in's: what LMCache gives to its operations is deferred, and its `synchronize` lets it run;
with the events taken out it does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvfix_tools.roundtrip import standin
from kvfix_tools.roundtrip.backends.lmcache import Connector, connectors
from kvfix_tools.roundtrip.cell import Cell
from kvfix_tools.roundtrip.races import Lanes, Race
from kvfix_tools.roundtrip.trip import Refused


class Stream(standin.Stream):
    """A lane as LMCache sees it."""

    def __init__(self, lanes: Lanes, lane: Any) -> None:
        self.lanes, self.lane = lanes, lane

    def synchronize(self) -> None:
        if self.lanes.events:
            self.lanes.finish(self.lane)


class ConnectorRace(Race):
    def __init__(self, cell: Cell, device: torch.device, events: bool) -> None:
        if device.type == "cuda" and not events:
            raise Refused("what LMCache waits for cannot be taken out of it on a GPU")
        super().__init__(cell, device, events)

    def copier(self) -> Any:
        """Without its buffer on the device, from which it copies at once."""
        connector = Connector(self.cell.backend.partition("-")[2], self, buffer=False)
        self.result.operations = f"{connector.operations.partition(',')[0]}, its {self.result.operations}"
        assert connector.host is not None
        return connector

    def store(self, lane: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self._streams(lane):
            self.copy.store(self.source)

    def load(self, lane: Any, copy: Any = None, slots: torch.Tensor | None = None) -> None:
        with self._streams(lane):
            self.copy.load(self.target, 0)

    @contextlib.contextmanager
    def _streams(self, lane: Any) -> Iterator[None]:
        """LMCache's streams are this lane, and its operations are submitted to it."""
        connector, module = self.copy.connector, connectors(self.device.type)
        if self.device.type == "cuda":
            connector.store_stream = connector.load_stream = lane.stream
            yield
            return
        connector.store_stream = connector.load_stream = Stream(self.lanes, lane)
        name = "device_ops" if hasattr(module, "device_ops") else "lmc_ops"
        real = getattr(module, name)

        def transfer(*arguments: Any, **more: Any) -> None:
            lane.submit(partial(real.multi_layer_kv_transfer, *arguments, **more))

        setattr(module, name, Instead(real, multi_layer_kv_transfer=transfer))
        try:
            yield
        finally:
            setattr(module, name, real)


class Instead(SimpleNamespace):
    """An object with some of its attributes replaced."""

    def __init__(self, real: Any, **names: Any) -> None:
        super().__init__(real=real, **names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
