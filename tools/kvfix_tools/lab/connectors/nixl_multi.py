"""NixlConnector in pull and push mode, together with LMCache's in-process connector (pair_multi.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfix_tools.lab.connectors import nixl, nixl_push
from kvfix_tools.lab.connectors.nixl_network import Network
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_multi import InTurn, MultiSide, MultiWorker


class NixlChild(InTurn, nixl.NixlWorker):
    """NixlConnector in the worker role."""


class NixlMultiSide(MultiSide, nixl.NixlSide):
    """Both roles of one engine."""

    workers: Any
    alone = nixl.NixlSide
    child_class: type[nixl.NixlWorker] = NixlChild
    child: nixl.NixlWorker

    def __init__(
        self, options: Options, memories: Sequence[Slots], network: Network, name: str, engine_id: str
    ) -> None:
        nixl.replace(network)
        super().__init__(options, memories, network, name, engine_id)
        self.scheduler_side.side_channel_host, self.scheduler_side.side_channel_port = name, nixl.PORT
        self.beside.set_xfer_handshake_metadata_pp_aware({(0, 0): self.in_worker.get_handshake_metadata()})

    @property
    def of_nixl(self) -> Sequence[nixl.NixlWorker]:
        return [self.child]


class PushChild(InTurn, nixl_push.PushWorker):
    """NixlConnector in push mode in the worker role."""


class PushMultiWorker(MultiWorker):
    """A worker whose writer thread runs after the connectors have begun their step."""

    def start_step(self, metadata: Any, forward: bool) -> None:
        super().start_step(metadata, forward)
        self.child.side.network.write()


class PushMultiSide(NixlMultiSide, nixl_push.PushSide):
    """Both roles of one engine."""

    worker = PushMultiWorker
    alone = nixl_push.PushSide
    child_class = PushChild
