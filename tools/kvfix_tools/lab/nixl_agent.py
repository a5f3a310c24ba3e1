"""A model of NIXL's agent (1.5): it registers memory, prepares and makes transfers, and delivers their notices.

It has the calls that vLLM makes. The memory is real, what moves are its bytes. A transfer takes some steps: what
changes meanwhile at its source arrives as garbage. All is in the lab's steps (nixl_network.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy

from kvfix_tools.lab.memory import GARBAGE

if TYPE_CHECKING:
    from kvfix_tools.lab.nixl_network import Network

#: Elements of a slot's contents, in bytes.
_ELEMENT = numpy.dtype(numpy.int64)


class AgentError(Exception):
    """What NIXL raises."""


class _List(NamedTuple):
    """A prepared list of descriptors. agent: whose memory it is. places: (address, bytes, device)."""

    agent: str
    places: Any


def _each(places: Any) -> Any:
    """All of them one by one."""
    if places.shape[1] == 3:
        return places
    return numpy.array(
        [
            (start + n * stride, size, device)
            for start, size, device, stride, count in places.tolist()
            for n in range(count)
        ]
    )


class _Transfer:
    """pairs: (address there, address here, bytes), where `there` is the source. found: its bytes when it began."""

    def __init__(self, peer: str, pairs: list[tuple[int, int, int]], notice: bytes) -> None:
        self.peer, self.pairs, self.notice = peer, pairs, notice
        self.state = ""
        self.due = 0
        self.found: list[bytes] = []


class Agent:
    """The calls of `nixl_agent` that vLLM makes."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self.name = name
        self.closed = False
        #: Notices that have arrived and are not fetched yet: (from, notice)
        self.notices: list[tuple[str, bytes]] = []
        self._lists: dict[int, _List] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._peers: set[str] = set()

    def close(self) -> None:
        """Its process has ended."""
        self.closed = True
        self.notices.clear()
        self._transfers.clear()

    # ------------------------------------------------------------------ memory and peers

    def get_reg_descs(self, ranges: Any, kind: str) -> Any:
        return ranges

    def register_memory(self, ranges: Any, backends: Any = None) -> Any:
        return ranges

    def deregister_memory(self, ranges: Any) -> None: ...

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return numpy.asarray(places)

    def prep_xfer_dlist(self, agent: str, places: Any, mem_type: str = "") -> int:
        """places: (address, bytes, device), or since vLLM 0.33 (address, bytes, device, stride, number)."""
        name = self.name if agent == "NIXL_INIT_AGENT" else agent
        if name != self.name and name not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        handle = self._network.handle()
        self._lists[handle] = _List(name, _each(places))
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self._lists[handle]

    def get_agent_metadata(self) -> bytes:
        return msgspec.msgpack.encode(self.name)

    def add_remote_agent(self, metadata: bytes) -> str:
        name = msgspec.msgpack.decode(metadata, type=str)
        self._peers.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self._peers.discard(name)

    def check_remote_metadata(self, name: str) -> bool:
        """NIXL forgets a peer whose connection broke."""
        return name in self._peers

    # ------------------------------------------------------------------ transfers

    def make_prepped_xfer(
        self, operation: str, local: int, here: Sequence[int], remote: int, there: Sequence[int], notif_msg: bytes = b""
    ) -> int:
        mine, theirs = self._lists[local], self._lists[remote]
        if theirs.agent not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        if self._network.fails("setup"):
            raise AgentError("NIXL_ERR_BACKEND")
        pairs = []
        for one, other in zip(here, there, strict=True):
            if not (0 <= one < len(mine.places) and 0 <= other < len(theirs.places)):
                raise AgentError("NIXL_ERR_INVALID_PARAM")
            address, size, _ = (int(each) for each in mine.places[one])
            far, far_size, _ = (int(each) for each in theirs.places[other])
            if size != far_size:
                raise AgentError("NIXL_ERR_MISMATCH")
            pairs.append((far, address, size) if operation == "READ" else (address, far, size))
        handle = self._network.handle()
        self._transfers[handle] = _Transfer(theirs.agent, pairs, notif_msg)
        return handle

    def transfer(self, handle: int) -> str:
        transfer = self._transfers[handle]
        if self._network.fails("transfer"):
            transfer.state = "ERR"
            return "ERR"
        transfer.state, transfer.due = "PROC", self._network.now + self._network.delay
        if self._reaches(transfer.peer):
            transfer.found = [ctypes.string_at(source, size) for source, _, size in transfer.pairs]
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return self._transfers[handle].state

    def get_xfer_telemetry(self, handle: int) -> None:
        return None

    def release_xfer_handle(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    @property
    def in_flight(self) -> bool:
        return any(transfer.state == "PROC" for transfer in self._transfers.values())

    def arrive(self, now: int) -> None:
        """The transfers that are due by this step are done, or have failed if the peer is gone."""
        for handle, transfer in self._transfers.items():
            if transfer.state != "PROC" or transfer.due > now:
                continue
            if not self._reaches(transfer.peer):
                transfer.state = "ERR"
                self._peers.discard(transfer.peer)
                continue
            self.finish(handle, transfer)
            transfer.state = "DONE"
            if transfer.notice:
                self._network.agents[transfer.peer].notices.append((self.name, transfer.notice))

    def finish(self, handle: int, transfer: _Transfer) -> None:
        """What it moves arrives."""
        for (source, target, size), found in zip(transfer.pairs, transfer.found, strict=True):
            garbage = numpy.full(size // _ELEMENT.itemsize, GARBAGE, _ELEMENT).tobytes()
            ctypes.memmove(target, found if ctypes.string_at(source, size) == found else garbage, size)

    def _reaches(self, peer: str) -> bool:
        return not self._network.agents[peer].closed

    # ------------------------------------------------------------------ notices

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        if agent not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        if not self._reaches(agent) or self._network.fails("notice"):
            raise AgentError("NIXL_ERR_BACKEND")
        self._network.agents[agent].notices.append((self.name, notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for peer, notice in self.notices:
            found.setdefault(peer, []).append(notice)
        self.notices.clear()
        return found
