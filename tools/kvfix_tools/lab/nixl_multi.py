"""NixlConnector and LMCache's in-process connector beside each other, in vLLM's MultiConnector, of two engines.

Real: the MultiConnector, both roles of both (v1.py, nixl.py have what is replaced). vLLM asks its children in order and
loads with the first that promises tokens; all of them store. Each engine that has LMCache has a cache of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvfix.connector_events import readers
from kvfix.ledger import events as ev
from kvfix_tools.lab import nixl, vllm_objects
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.nixl_network import Network
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair_engine import PairSide, Params
from kvfix_tools.lab.v1 import V1, V1Worker
from kvfix_tools.lab.workers import Worker

if TYPE_CHECKING:
    from kvfix_tools.lab.request_events import RequestEvents


class _Counted:
    """What NIXL loads is no event of LMCache's: it is counted, and that it has failed is said."""

    def __init__(self, events: RequestEvents) -> None:
        self._events = events

    def loaded(self, name: str, end: int, tokens: int, rank: int = 0) -> None:
        self._events.counts["loaded_beside"] += bool(tokens)
        self._events.counts["loaded_tokens"] += tokens
        if not tokens:
            self._events.counts["loads_failed"] += 1
            self._events.add(ev.LoadFailed(name, None))


class NixlChild(nixl.NixlWorker):
    """NixlConnector in the worker's role, which the MultiConnector asks what is done."""

    def __init__(self, side: Any, slots: Slots, called: Any, options: Options) -> None:
        super().__init__(side, slots, called, options)
        self.called = SimpleNamespace(get_transfer_results=called.get_transfer_results)
        called.get_transfer_results = self._results

    def _results(self, ended: set[str]) -> KVConnectorTransferResults:
        sending, receiving = self.get_finished(ended)
        return KVConnectorTransferResults(
            finished_sending=sending, finished_recving=receiving, failed_recving=self._failed
        )

    def due(self, metadata: Any) -> None:
        """A step begins with these metadata of its own."""
        self._due.update({name: (start, end) for name, start, end in self._reader.loads(metadata) or ()})


class InMulti(Worker):
    """The MultiConnector in the worker's role, of which NixlConnector is one."""

    nixl: NixlChild
    #: Its place among the children.
    place: int

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.nixl.due(metadata.metadata[self.place])
        super().start_step(metadata, forward)

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> Any:
        report = super().finish_step(forward, ended, save_last)
        self.called.clear_connector_metadata()
        return report

    def get_finished(self, ended: set[str]) -> Any:
        results = self.called.get_transfer_results(ended)
        self._failed = set(results.failed_recving)
        return results.finished_sending, results.finished_recving

    def also_reported(self) -> dict[str, Any]:
        return {**super().also_reported(), "failed_recving": self._failed}


class MultiWorker(InMulti, V1Worker):
    """With LMCache's connector as the other."""


class MultiSide(V1, PairSide):
    """Both roles of one engine. An engine that is not in `Options.multi` has NixlConnector alone."""

    worker = MultiWorker

    def __new__(cls, options: Options, memories: Sequence[Slots], network: Network, name: str, engine_id: str) -> Any:
        if name in options.multi:
            return super().__new__(cls)
        return nixl.NixlSide(dataclasses.replace(options, multi=()), memories, network, name, engine_id)

    def __init__(
        self, options: Options, memories: Sequence[Slots], network: Network, name: str, engine_id: str
    ) -> None:
        nixl.replace(network)
        self.network = network
        self.name, self.engine_id = name, engine_id
        super().__init__(options, memories, [Cache()])
        self._role = "kv_both"  # LMCache's own, whichever NIXL has
        worker: Any = self.workers[0]
        worker.place = 1 - self._place
        self._nixl = self.scheduler.connector._connectors[worker.place]
        self.scheduler_side = self._nixl.connector_scheduler
        self.scheduler_side.side_channel_host, self.scheduler_side.side_channel_port = name, nixl.PORT
        in_worker = worker.called._connectors[worker.place]
        self.nixl = worker.nixl = NixlChild(self, memories[0], in_worker, options)
        self._nixl.set_xfer_handshake_metadata_pp_aware({(0, 0): in_worker.get_handshake_metadata()})
        self._readers = {"nixl": readers.reader(self._nixl), "nixl in the worker": readers.reader(in_worker)}

    @classmethod
    def make_network(cls, options: Options) -> Network:
        return nixl.NixlSide.make_network(options)

    def configured(self, options: Options) -> Any:
        config = vllm_objects.vllm_config(options)
        config.kv_transfer_config.engine_id = self.engine_id
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        self.nixl.events = _Counted(events)  # type: ignore[assignment]

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return super().evict(self.cache_engines[0].cache, chunks, forced)

    # ------------------------------------------------------------------ NIXL's, as NixlSide has it

    def for_prefill(self, name: str) -> Params:
        return dict(nixl.PREFILL)

    def keeps(self, request: str) -> bool:
        return request in self.scheduler_side._reqs_need_send

    def close(self) -> None:
        nixl.close(self.network, self.nixl)

    @property
    def leases(self) -> set[str]:
        return set(self.nixl.adapter._reqs_to_send)

    def busy(self) -> bool:
        return self.network.busy or bool(self.leases)

    def loading(self) -> set[str]:
        return set(self.nixl.adapter._recving_metadata)

    def in_flight(self, request: str) -> set[str]:
        doing = {"loading": request in self.loading(), "storing": request in self.leases}
        return {name for name, yes in doing.items() if yes}

    def kept(self) -> dict[str, set[str]]:
        of_nixl = {
            f"{place}: {where}": set(names) for place, each in self._readers.items() for where, names in each.kept()
        }
        return {**super().kept(), **of_nixl}
