"""MooncakeConnector together with LMCache's in-process connector (pair_multi.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfix_tools.lab.connectors import mooncake
from kvfix_tools.lab.connectors.mooncake_network import Network
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_multi import InTurn, MultiSide


class MooncakeChild(InTurn, mooncake.MooncakeWorker):
    """MooncakeConnector in the worker role."""


class MooncakeMultiSide(MultiSide, mooncake.MooncakeSide):
    """Both roles of one engine."""

    workers: Any
    alone = mooncake.MooncakeSide
    child_class = MooncakeChild
    child: MooncakeChild

    def __init__(
        self, options: Options, memories: Sequence[Slots], network: Network, name: str, engine_id: str
    ) -> None:
        self.join(network, name)
        super().__init__(options, memories, network, name, engine_id)

    @property
    def of_mooncake(self) -> mooncake.MooncakeWorker:
        return self.child
