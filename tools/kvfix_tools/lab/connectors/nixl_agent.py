"""A model of NIXL's agent (1.5): it registers memory, prepares and makes transfers, and delivers notices.

It has the calls that vLLM makes, and moves bytes of real memory (byte_memory.py). nixl_real.py compares this model with
NIXL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy

from kvfix_tools.lab.engine.byte_memory import Copy, spoil

if TYPE_CHECKING:
    from kvfix_tools.lab.connectors.nixl_network import Network

#: NIXL's error for a peer whose process has ended.
GONE = "NIXL_ERR_REMOTE_DISCONNECT"


class AgentError(Exception):
    """The exception of NIXL."""


class _List(NamedTuple):
    """A prepared list of descriptors. agent: the owner of the memory. places: (address, bytes, device)."""

    agent: str
    places: Any


def _each(places: Any) -> Any:
    if places.shape[1] == 3:
        return places
    return numpy.array(
        [
            (start + n * stride, size, device)
            for start, size, device, stride, count in places.tolist()
            for n in range(count)
        ]
    )


class Transfer:
    """A transfer. pairs: (source address, target address, bytes). copy: from its begin."""

    def __init__(self, peer: str, reads: bool, pairs: list[tuple[int, int, int]], notice: bytes) -> None:
        self.peer, self.reads, self.pairs, self.notice = peer, reads, pairs, notice
        self.state = ""
        self.copy: Copy


class Agent:
    """The functions of `nixl_agent` that vLLM calls."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self.name = name
        self.closed = False
        #: Additional steps of transfers from and to this agent.
        self.late = 0
        #: Notices that have arrived but are not read yet: (sender, notice)
        self.notices: list[tuple[str, bytes]] = []
        self._lists: dict[int, _List] = {}
        self._transfers: dict[int, Transfer] = {}
        self._peers: set[str] = set()

    def close(self) -> None:
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
        """Return True also for a peer whose process has ended, as nixl 1.5.1 does."""
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
        handle = self._network.handle()
        self.prepare(handle, operation, local, here, remote, there, notif_msg)
        pairs = []
        for one, other in zip(here, there, strict=True):
            address, size, _ = (int(each) for each in mine.places[one])
            far, _, _ = (int(each) for each in theirs.places[other])
            pairs.append((far, address, size) if operation == "READ" else (address, far, size))
        self._transfers[handle] = Transfer(theirs.agent, operation == "READ", pairs, notif_msg)
        return handle

    def prepare(
        self, handle: int, operation: str, local: int, here: Sequence[int], remote: int, there: Any, notice: bytes
    ) -> None:
        """Raises AgentError for unknown or missing places, and for lists with different numbers of places or bytes."""
        mine, theirs = self._lists[local].places, self._lists[remote].places
        if len(here) == len(there) > 0:
            pairs = zip(here, there, strict=True)
            if all(0 <= a < len(mine) and 0 <= b < len(theirs) and mine[a][1] == theirs[b][1] for a, b in pairs):
                return
        raise AgentError("NIXL_ERR_INVALID_PARAM")

    def transfer(self, handle: int) -> str:
        transfer = self._transfers[handle]
        if self._network.fails("transfer"):
            transfer.state = "ERR"
            return "ERR"
        self.begin(handle, transfer)
        late = max(self.late, self._network.agents[transfer.peer].late)
        transfer.state = "PROC"
        transfer.copy = Copy(transfer.pairs, self._network.now + self._network.delay + late)
        return "PROC"

    def begin(self, handle: int, transfer: Transfer) -> None:
        """Raises AgentError if the peer has ended. A part of the transfer may have arrived (seen with nixl 1.5.1)."""
        if not self._reaches(transfer.peer):
            spoil(transfer.pairs if transfer.reads else ())
            raise AgentError(GONE)

    def check_xfer_state(self, handle: int) -> str:
        state = self._transfers[handle].state
        if state == GONE:
            raise AgentError(state)
        return state

    def get_xfer_telemetry(self, handle: int) -> None:
        return None

    def release_xfer_handle(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    @property
    def in_flight(self) -> bool:
        return any(transfer.state == "PROC" for transfer in self._transfers.values())

    def arrive(self, now: int) -> None:
        """End the transfers that are due. They fail if the peer has ended."""
        for handle, transfer in self._transfers.items():
            if transfer.state == "PROC" and transfer.copy.due <= now:
                self.finish(handle, transfer)

    def finish(self, handle: int, transfer: Transfer) -> None:
        """Move the bytes and deliver the notice. If the peer has ended, move a part of the bytes."""
        if not self._reaches(transfer.peer):
            transfer.state = GONE
            spoil(transfer.pairs if transfer.reads else ())
            return
        transfer.state = "DONE"
        if transfer.notice:
            self._network.agents[transfer.peer].notices.append((self.name, transfer.notice))
        transfer.copy.arrive()

    def _reaches(self, peer: str) -> bool:
        return not self._network.agents[peer].closed

    # ------------------------------------------------------------------ notices

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        if agent in self._peers and self._reaches(agent) and self._network.fails("notice"):
            raise AgentError("NIXL_ERR_BACKEND")
        self.notify(agent, notif_msg)

    def notify(self, agent: str, notice: bytes) -> None:
        """Deliver a notice to the peer. Raises AgentError if the peer is unknown or has ended."""
        if agent not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        if not self._reaches(agent):
            raise AgentError(GONE)
        self._network.agents[agent].notices.append((self.name, notice))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for peer, notice in self.notices:
            found.setdefault(peer, []).append(notice)
        self.notices.clear()
        return found
