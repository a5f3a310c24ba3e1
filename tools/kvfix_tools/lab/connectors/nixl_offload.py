"""NixlConnector and OffloadingConnector in vLLM's MultiConnector, in both of two engines.

nixl.py and offloading.py describe the replaced parts. vLLM asks both connectors in order and loads with the first one
that promises tokens. Both connectors store. Each engine has its own CPU memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfix_tools.lab.connectors.nixl import NixlSide, NixlWorker
from kvfix_tools.lab.connectors.nixl_multi import NixlChild
from kvfix_tools.lab.connectors.offloading import Offloading, OffloadingSteps, Rank
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_multi import InMulti


class OffloadWorker(InMulti, Worker):
    """The MultiConnector in the worker role."""

    offloads = True

    def __init__(self, side: Any, slots: Slots, called: Any, options: Options) -> None:
        self.place = options.asked_before
        of_nixl, offloading = called._connectors[self.place], called._connectors[1 - self.place]
        self.child = NixlChild(side, slots, of_nixl, options)
        super().__init__(0, slots, called, of_nixl, self.child.adapter, {})
        self.copying = Rank(0, slots, options, offloading)


class OffloadSide(OffloadingSteps, NixlSide):
    """Both roles of one engine."""

    worker_class: Any = OffloadWorker
    workers: Sequence[OffloadWorker]
    offloading: Offloading

    def _make(self, options: Options, memories: Sequence[Slots]) -> None:
        super()._make(options, memories)
        beside = self.scheduler.connector._connectors[1 - self._place]
        self.offloading = Offloading(options, [self.workers[0].copying], beside)

    @property
    def between(self) -> Sequence[NixlWorker]:
        return [self.workers[0].child]

    def close(self) -> None:
        super().close()
        self.offloading.close()
