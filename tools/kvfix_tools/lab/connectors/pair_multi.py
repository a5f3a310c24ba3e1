"""Run a MultiConnector with two children in one or both engines of a pair. The engines share no cache or CPU memory.

One child transfers KV between the engines. The other child is LMCache's in-process connector or OffloadingConnector.
vLLM loads with the first child that promises tokens, and stores with both children.
"""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvfix.connector_events import readers
from kvfix.ledger import events as ev
from kvfix_tools.lab.connectors.mooncake import MooncakeSide
from kvfix_tools.lab.connectors.nixl import NixlSide, PushSide
from kvfix_tools.lab.connectors.v1 import V1, V1Worker
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_engine import PairSide


class Counted:
    """Counts the loads of the child that transfers KV. Reports failed loads, and records no LMCache events."""

    def __init__(self, events: RequestEvents) -> None:
        self._events, self.model = events, events.model

    def loaded(self, name: str, end: int, tokens: int, rank: int = 0) -> None:
        self._events.counts["loaded_beside"] += bool(tokens)
        self._events.counts["loaded_tokens"] += tokens
        if not tokens:
            self._events.counts["loads_failed"] += 1
            self._events.add(ev.LoadFailed(name, None))
            if not self._events.may_fail.intersection((name, "")):
                self._events.violated(rules.LOAD_CAME_SHORT, name, "the child that transfers KV has loaded nothing")


def _in_turn(child: Any) -> Any:
    """Let the MultiConnector get transfer results through the worker `child`, which records events. Return `child`."""
    called = child.called
    child.called = SimpleNamespace(get_transfer_results=called.get_transfer_results)

    def results(ended: set[str]) -> KVConnectorTransferResults:
        sending, receiving = child.get_finished(ended)
        return KVConnectorTransferResults(
            finished_sending=sending, finished_recving=receiving, failed_recving=child._failed_requests
        )

    called.get_transfer_results = results
    return child


class InMulti(Worker):
    """The MultiConnector in the worker role."""

    clears = by_request = True
    #: child: the connector between the engines. place: the index of `child` in the MultiConnector.
    child: Any
    place: int

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.child.take_due(metadata.metadata[self.place])
        super().start_step(metadata, forward)
        self.child.begun()


class MultiWorker(InMulti, V1Worker): ...


class MultiSide(V1, PairSide):
    """Both roles of one engine's connector. An engine that is not in `Options.multi` has no LMCache."""

    worker = MultiWorker
    #: The class for an engine without LMCache.
    alone: type[Any]

    def __new__(cls, options: Options, memories: Sequence[Slots], network: Any, name: str, engine_id: str) -> Any:
        if name in options.multi:
            return super().__new__(cls)
        return cls.alone(dataclasses.replace(options, multi=()), memories, network, name, engine_id)

    def __init__(self, *arguments: Any) -> None:
        PairSide.__init__(self, *arguments)

    configured = PairSide.configured

    def _make(self, options: Options, memories: Sequence[Slots]) -> None:
        V1.__init__(self, options, memories, [Cache()])
        self._role = "kv_both"  # the role of LMCache, which does not depend on the role of the other connector
        worker: Any = self.workers[0]
        worker.place = 1 - self._place
        self.beside = self.scheduler.connector._connectors[worker.place]
        self.scheduler_side = self.beside.connector_scheduler
        in_worker = worker.called._connectors[worker.place]
        self.child = worker.child = _in_turn(self.alone.worker_class(self, memories[0], in_worker, options))
        self._reader_beside = readers.reader(self.beside)
        self.introduce(self.beside)

    @property
    def between(self) -> Sequence[Any]:
        return [self.child]

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        self.child.events = Counted(events)

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return super().evict(self.cache_engines[0].cache, chunks, forced)

    def kept(self) -> dict[str, set[str]]:
        return {**super().kept(), **{f"beside: {where}": set(names) for where, names in self._reader_beside.kept()}}


class NixlAndLMCache(MultiSide, NixlSide):
    alone = NixlSide


class PushAndLMCache(MultiSide, PushSide):
    alone = PushSide


class MooncakeAndLMCache(MultiSide, MooncakeSide):
    alone = MooncakeSide


class OffloadWorker(InMulti):
    """A MultiConnector with NixlConnector and OffloadingConnector, in the worker role."""

    def __init__(self, side: Any, slots: Slots, called: Any, options: Options) -> None:
        self.place = options.asked_before
        in_worker = called._connectors[self.place]
        self.child = _in_turn(NixlSide.worker_class(side, slots, in_worker, options))
        super().__init__(0, slots, called, in_worker, self.child.adapter, {})


class NixlAndOffloading(NixlSide):
    worker_class: Any = OffloadWorker
    workers: Sequence[OffloadWorker]

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return int(self.offloading.evict(chunks, forced))

    @property
    def between(self) -> Sequence[Any]:
        return [self.workers[0].child]
