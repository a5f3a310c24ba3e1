"""MooncakeConnector together with LMCache's in-process connector (pair_multi.py)."""

from __future__ import annotations

from kvfix_tools.lab.connectors.mooncake import MooncakeSide, MooncakeWorker
from kvfix_tools.lab.pair.pair_multi import InTurn, MultiSide


class MooncakeChild(InTurn, MooncakeWorker):
    """MooncakeConnector in the worker role."""


class MooncakeMultiSide(MultiSide, MooncakeSide):
    """Both roles of one engine."""

    alone = MooncakeSide
    child_class = MooncakeChild
