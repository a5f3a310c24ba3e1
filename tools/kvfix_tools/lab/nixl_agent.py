"""What is between two engines with NixlConnector: a model of NIXL's agent, the handshake's sockets and its thread.

A stand-in for NIXL (1.5): it registers memory, prepares and makes transfers, and delivers their notices, with the
calls that vLLM makes. The memory is real, what moves are its bytes. A transfer takes some steps: what changes
meanwhile at its source arrives as garbage. All is in the lab's steps, so that a schedule plays the same way each time.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy
import zmq

from kvfix_tools.lab.memory import GARBAGE

#: Elements of a slot's contents, in bytes.
_ELEMENT = numpy.dtype(numpy.int64)


class AgentError(Exception):
    """What NIXL raises."""


class Network:
    """The agents by name, who answers handshakes where, and what is on its way. delay: steps that a transfer takes."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.agents: dict[str, Agent] = {}
        #: host:port -> the function of the thread that answers handshakes there
        self.listeners: dict[str, Callable[[], None]] = {}
        #: The message that it gets, and what it sends.
        self._asked, self._said = b"", list[bytes]()
        #: Addresses where that thread has died.
        self.dead_listeners: list[str] = []
        #: How many of the next transfers and handshakes fail, and the steps that a handshake takes.
        self.failing = {"transfer": 0, "handshake": 0}
        self.handshake_steps = 1
        self.now = 0
        self._handshakes: list[tuple[int, Future[Any], Callable[[], Any]]] = []
        self._handles = itertools.count(1)
        self._names = itertools.count(1)

    def agent(self, _: str, config: Any = None) -> Agent:
        """In place of `nixl_agent`: its name is not vLLM's random one."""
        name = f"agent-{next(self._names)}"
        self.agents[name] = made = Agent(self, name)
        return made

    def handle(self) -> int:
        return next(self._handles)

    def fails(self, what: str) -> bool:
        """Whether this one fails."""
        if not self.failing[what]:
            return False
        self.failing[what] -= 1
        return True

    @property
    def busy(self) -> bool:
        return bool(self._handshakes) or any(agent.in_flight or agent.notices for agent in self.agents.values())

    def tick(self) -> None:
        """A step begins: what is due arrives."""
        self.now += 1
        due = [each for each in self._handshakes if each[0] <= self.now]
        self._handshakes = [each for each in self._handshakes if each[0] > self.now]
        for _, future, work in due:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001, PERF203  the worker gets it
                future.set_exception(error)
        for agent in list(self.agents.values()):
            agent.arrive()

    # ------------------------------------------------------------------ the handshake

    def executor(self) -> Any:
        """In place of the thread that makes the handshakes of one worker."""
        return _Executor(self)

    def shake_hands(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._handshakes.append((self.now + self.handshake_steps, future, work))
        return future

    @contextmanager
    def socket(self, kind: Any, path: str) -> Iterator[Any]:
        """In place of `zmq_ctx`."""
        yield _Listening(self) if kind == zmq.ROUTER else _Asking(self, path.removeprefix("tcp://"))

    def listen(self, **thread: Any) -> _Thread:
        """In place of the thread that answers handshakes."""
        *arguments, ready, _, host, port = thread["args"]
        self.listeners[f"{host}:{port}"] = lambda: thread["target"](*arguments, ready, _Stopped, host, port)
        return _Thread(ready)

    def ask(self, address: str, message: bytes) -> list[bytes]:
        """The answer of who listens there. Its thread ends if it raises, and nothing is answered any more."""
        if address not in self.listeners or self.fails("handshake"):
            raise zmq.Again
        self._asked, self._said = message, []
        try:
            self.listeners[address]()
        except Exception:  # noqa: BLE001
            self.dead_listeners.append(address)
            del self.listeners[address]
        if not self._said:
            raise zmq.Again
        return self._said


class _Executor:
    def __init__(self, network: Network) -> None:
        self._network = network

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._network.shake_hands(lambda: function(*arguments))

    def shutdown(self, wait: bool = True) -> None: ...


class _Stopped:
    """In place of the event that ends the thread: it is looked at when no message is left."""

    @staticmethod
    def is_set() -> bool:
        return True


class _Thread:
    def __init__(self, ready: Any) -> None:
        self._ready = ready

    def start(self) -> None:
        self._ready.set()

    def join(self, timeout: float = 0) -> None: ...


class _Asking:
    """The socket of the worker that asks for a handshake."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._message = b""

    def setsockopt(self, *_: Any) -> None: ...

    def send(self, message: bytes) -> None:
        self._message = message

    def recv_multipart(self) -> list[bytes]:
        return self._network.ask(self._address, self._message)


class _Listening:
    """The socket of the thread that answers it: there is one message."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._left = True

    def setsockopt(self, *_: Any) -> None: ...

    def recv_multipart(self) -> tuple[bytes, bytes, bytes]:
        if not self._left:
            raise zmq.Again
        self._left = False
        return b"worker", b"", self._network._asked

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        self._network._said = list(parts[2:])


class _List(NamedTuple):
    """A prepared list of descriptors. agent: whose memory it is. places: (address, bytes, device)."""

    agent: str
    places: Any


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

    def prep_xfer_dlist(self, agent: str, places: Any, **_: Any) -> int:
        name = self.name if agent == "NIXL_INIT_AGENT" else agent
        if name != self.name and name not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        handle = self._network.handle()
        self._lists[handle] = _List(name, places)
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

    def arrive(self) -> None:
        """The transfers that are due are done, or have failed if the peer is gone."""
        for transfer in self._transfers.values():
            if transfer.state != "PROC" or transfer.due > self._network.now:
                continue
            if not self._reaches(transfer.peer):
                transfer.state = "ERR"
                self._peers.discard(transfer.peer)
                continue
            for (source, target, size), found in zip(transfer.pairs, transfer.found, strict=True):
                garbage = numpy.full(size // _ELEMENT.itemsize, GARBAGE, _ELEMENT).tobytes()
                ctypes.memmove(target, found if ctypes.string_at(source, size) == found else garbage, size)
            transfer.state = "DONE"
            if transfer.notice:
                self._network.agents[transfer.peer].notices.append((self.name, transfer.notice))

    def _reaches(self, peer: str) -> bool:
        return not self._network.agents[peer].closed

    # ------------------------------------------------------------------ notices

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        if agent not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        if not self._reaches(agent):
            raise AgentError("NIXL_ERR_BACKEND")
        self._network.agents[agent].notices.append((self.name, notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for peer, notice in self.notices:
            found.setdefault(peer, []).append(notice)
        self.notices.clear()
        return found
