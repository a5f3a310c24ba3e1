"""NixlConnector and OffloadingConnector in vLLM's MultiConnector, in both of two engines.

nixl.py and offloading.py describe the replaced parts. vLLM asks both connectors in order and loads with the first one
that promises tokens. Both connectors store. Each engine has its own CPU memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.connectors.nixl import NixlSide
from kvfix_tools.lab.connectors.nixl_multi import NixlChild
from kvfix_tools.lab.connectors.nixl_network import Network
from kvfix_tools.lab.connectors.offloading import Offloading, Rank
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_multi import InMulti

if TYPE_CHECKING:
    from kvfix_tools.lab.engine.request_events import RequestEvents


class OffloadWorker(InMulti, Worker):
    """The MultiConnector in the worker role."""

    offloads = True

    def __init__(self, side: Any, slots: Slots, called: Any, options: Options) -> None:
        self.place = options.asked_before
        of_nixl, offloading = called._connectors[self.place], called._connectors[1 - self.place]
        self.child = NixlChild(side, slots, of_nixl, options)
        super().__init__(0, slots, called, of_nixl, self.child.adapter, {})
        self.copying = Rank(0, slots, options, offloading)


class OffloadSide(NixlSide):
    """Both roles of one engine."""

    worker_class: Any = OffloadWorker
    offloading: Offloading

    def __init__(
        self, options: Options, memories: Sequence[Slots], network: Network, name: str, engine_id: str
    ) -> None:
        super().__init__(options, memories, network, name, engine_id)
        worker: Any = self.workers[0]
        self.offloading = Offloading(options, [worker.copying], self.scheduler.connector._connectors[1 - self._place])

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        worker: Any = self.workers[0]
        worker.child.events = events

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return self.offloading.evict(chunks, forced)

    def fail_store(self, name: str, rank: int = 0) -> None:
        """A step: the next store of this request to CPU memory fails."""
        self.offloading.ranks[rank].failing_stores.add(name)

    def close(self) -> None:
        super().close()
        self.offloading.close()

    # ------------------------------------------------------------------ transfers in flight, and kept requests

    def busy(self) -> bool:
        return super().busy() or self.offloading.busy

    def loading(self) -> set[str]:
        return super().loading() | self.offloading.requests(loads=True)

    def in_flight(self, request: str) -> set[str]:
        return super().in_flight(request) | self.offloading.in_flight(request)
