"""NixlConnector in pull and push mode, together with LMCache's in-process connector (pair_multi.py)."""

from __future__ import annotations

from typing import Any

from kvfix_tools.lab.connectors.nixl import NixlSide, NixlWorker
from kvfix_tools.lab.connectors.nixl_push import PushSide, PushWorker
from kvfix_tools.lab.pair.pair_multi import InTurn, MultiSide, MultiWorker


class NixlChild(InTurn, NixlWorker):
    """NixlConnector in the worker role."""


class NixlMultiSide(MultiSide, NixlSide):
    """Both roles of one engine."""

    alone = NixlSide
    child_class = NixlChild


class PushChild(InTurn, PushWorker):
    """NixlConnector in push mode in the worker role."""


class PushMultiWorker(MultiWorker):
    """A worker whose writer thread runs after the connectors have begun their step."""

    def start_step(self, metadata: Any, forward: bool) -> None:
        super().start_step(metadata, forward)
        self.child.side.network.write()


class PushMultiSide(MultiSide, PushSide):
    """Both roles of one engine."""

    worker = PushMultiWorker
    alone = PushSide
    child_class = PushChild
