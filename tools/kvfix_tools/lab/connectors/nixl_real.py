"""Use real NIXL over UCX instead of the model in nixl_network.py. NIXL's agents move the bytes and deliver notices.

The lab decides in which step a transfer ends, so runs with NIXL and with the model have the same steps. In the step in
which the model would end a transfer, the lab starts NIXL's transfer and waits for its end. A late start is the worst
case, because the source may have changed by then. NIXL refuses wrong calls. The lab refuses calls to a dead peer.
"""

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy

from kvfix_tools.lab.connectors.nixl_network import GONE, Agent, AgentError, Network, Transfer

# Without this variable, NIXL logs each refused call and also raises an exception. NIXL reads the variable at import.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
#: Maximum seconds that the lab waits for a transfer or a notice. Both usually take milliseconds.
_PATIENCE = 20.0


class RealAgent(Agent):
    """An agent that transfers with a real `nixl_agent`. The lab decides when vLLM sees the result of a transfer."""

    _network: "RealNetwork"

    def __init__(self, network: "RealNetwork", name: str) -> None:
        super().__init__(network, name)
        api = import_module("nixl._api")
        # NIXL's own polling thread is off, because the lab polls in `progress`.
        self._real: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._real_lists: dict[int, Any] = {}
        self._real_transfers: dict[int, Any] = {}
        #: (sender, notice) of each notice that NIXL has delivered, but that the lab has not passed to vLLM yet
        self._brought: list[tuple[str, bytes]] = []

    def close(self) -> None:
        """Close NIXL's agent too. If vLLM releases handles after this call, only the lab's state changes."""
        super().close()
        self._real_transfers.clear()
        self._real_lists.clear()
        self._real = None

    def progress(self) -> None:
        if self._real is not None:
            for peer, notices in self._real.get_new_notifs().items():
                self._brought += [(peer, notice) for notice in notices]

    def get_reg_descs(self, ranges: Any, kind: str) -> Any:
        return self._real.get_reg_descs(ranges, kind)

    def register_memory(self, ranges: Any, backends: Any = None) -> Any:
        return self._real.register_memory(ranges, backends=["UCX"])

    def deregister_memory(self, ranges: Any) -> None:
        if not self.closed:
            self._real.deregister_memory(ranges)

    def prep_xfer_dlist(self, agent: str, places: Any, mem_type: str = "DRAM") -> int:
        made = self._real.prep_xfer_dlist(agent, numpy.asarray(places, dtype=numpy.uint64), "DRAM")
        handle = super().prep_xfer_dlist(agent, places, mem_type)
        self._real_lists[handle] = made
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        super().release_dlist_handle(handle)
        if not self.closed:
            self._real.release_dlist_handle(self._real_lists.pop(handle))

    def get_agent_metadata(self) -> bytes:
        return bytes(self._real.get_agent_metadata())

    def add_remote_agent(self, metadata: bytes) -> str:
        name: Any = self._real.add_remote_agent(metadata)
        self._peers.add(name := name.decode())
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        super().remove_remote_agent(name)
        if not self.closed:
            self._real.remove_remote_agent(name)

    def check_remote_metadata(self, name: str) -> bool:
        return bool(self._real.check_remote_metadata(name))

    def prepare(self, handle: int, reads: bool, local: int, here: Any, remote: int, there: Any, notice: bytes) -> None:
        mine, theirs = (numpy.asarray(each, dtype=numpy.int32) for each in (here, there))
        self._real_transfers[handle] = self._real.make_prepped_xfer(
            "READ" if reads else "WRITE", self._real_lists[local], mine, self._real_lists[remote], theirs, notice
        )

    def begin(self, handle: int, transfer: Transfer) -> None:
        if not self._reaches(transfer.peer):
            self._real.transfer(self._real_transfers[handle])
            self._has_to_be_there(transfer.peer)

    def _has_to_be_there(self, peer: str) -> None:
        """Raise AgentError if the peer has ended, even if NIXL has not noticed the end yet."""
        if not self._reaches(peer):
            self._network.counts["nixl_unaware"] += 1
            raise AgentError(GONE)

    def check_xfer_state(self, handle: int) -> str:
        """Until the lab starts the transfer in NIXL, return the lab's state. After that, return NIXL's state."""
        if self._transfers[handle].state in ("", "PROC", "ERR", GONE):
            return super().check_xfer_state(handle)
        return str(self._real.check_xfer_state(self._real_transfers[handle]))

    def release_xfer_handle(self, handle: int) -> None:
        super().release_xfer_handle(handle)
        if handle in self._real_transfers:
            self._real.release_xfer_handle(self._real_transfers.pop(handle))

    def finish(self, handle: int, transfer: Transfer) -> None:
        real = self._real_transfers[handle]
        transfer.state = "HANDED OVER"
        try:
            self._real.transfer(real)
            if not self._reaches(transfer.peer):
                transfer.state = GONE
                self._network.counts["nixl_unaware"] += 1
                return
            self._network.wait(lambda: bool(self._real.check_xfer_state(real) != "PROC"), f"transfer {handle}")
        except AgentError:
            raise
        except Exception:  # noqa: BLE001  the worker gets the error when it asks for the state
            return
        self._network.counts["nixl_transfers"] += 1
        self._network.counts["nixl_bytes"] += sum(size for _, _, size in transfer.pairs)
        if transfer.notice:
            self._bring(transfer.peer)

    def notify(self, agent: str, notice: bytes) -> None:
        self._real.send_notif(agent, notice)
        self._has_to_be_there(agent)
        self._bring(agent)

    def _bring(self, peer: str) -> None:
        its: Any = self._network.agents[peer]
        self._network.wait(lambda: bool(its._brought), f"notice for {peer}")
        its.notices.append(its._brought.pop(0))
        self._network.counts["nixl_notices"] += 1


class RealNetwork(Network):
    agent_class = RealAgent

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Poll all agents until `is_so` returns True. Raise AgentError after `_PATIENCE` seconds."""
        until = time.monotonic() + _PATIENCE
        while not is_so():
            if time.monotonic() > until:
                raise AgentError(f"NIXL: no {what} within {_PATIENCE:g} s")
            agents: Any = self.agents.values()
            for agent in agents:
                agent.progress()
