"""Replace NIXL's agents, and the sockets and threads of NixlConnector's handshake, with objects that the lab runs."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import zmq

from kvfix_tools.lab.connectors.connector import nothing
from kvfix_tools.lab.engine.byte_memory import Copy, spoil
from kvfix_tools.lab.pair.pair_engine import PairNetwork

#: NIXL's error for a peer whose process has ended.
GONE = "NIXL_ERR_REMOTE_DISCONNECT"


class AgentError(Exception):
    """Replaces the exceptions that NIXL raises."""


def _each(places: Any) -> Any:
    if places.shape[1] == 3:
        return places
    rows = places.tolist()
    return numpy.array([(at + n * by, size, device) for at, size, device, by, count in rows for n in range(count)])


class Transfer:
    """A NIXL transfer. pairs: (source address, target address, number of bytes). copy: set by `Agent.transfer`."""

    def __init__(self, peer: str, reads: bool, pairs: list[tuple[int, int, int]], notice: bytes) -> None:
        self.peer, self.reads, self.pairs, self.notice = peer, reads, pairs, notice
        self.state = ""
        self.copy: Copy


class Agent:
    """A model of the agent of NIXL 1.5, with the methods that vLLM calls. fuzz.py compares the model with real NIXL."""

    def __init__(self, network: "Network", name: str) -> None:
        self._network = network
        self.name = name
        self.closed = False
        #: Number of additional steps that transfers from and to this agent take.
        self.late = 0
        #: (sender, notice) of each notice that has arrived and that vLLM has not read
        self.notices: list[tuple[str, bytes]] = []
        #: {handle: (agent that owns the memory, rows of (address, bytes, device))} of prepared descriptor lists
        self._lists: dict[int, tuple[str, Any]] = {}
        self._transfers: dict[int, Transfer] = {}
        self._peers: set[str] = set()

    def close(self) -> None:
        self.closed = True
        self.notices.clear()
        self._transfers.clear()

    def get_reg_descs(self, ranges: Any, kind: str) -> Any:
        return ranges

    def register_memory(self, ranges: Any, backends: Any = None) -> Any:
        return ranges

    def deregister_memory(self, ranges: Any) -> None: ...

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return numpy.asarray(places)

    def prep_xfer_dlist(self, agent: str, places: Any, mem_type: str = "") -> int:
        """Return a new descriptor list's handle. Rows: (address, bytes, device). vLLM 0.33 adds stride and count."""
        name = self.name if agent == "NIXL_INIT_AGENT" else agent
        if name != self.name and name not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        handle = self._network.handle()
        self._lists[handle] = name, _each(places)
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

    def make_prepped_xfer(
        self, operation: str, local: int, here: Sequence[int], remote: int, there: Sequence[int], notif_msg: bytes = b""
    ) -> int:
        (_, mine), (peer, theirs) = self._lists[local], self._lists[remote]
        if peer not in self._peers:
            raise AgentError("NIXL_ERR_NOT_FOUND")
        if self._network.fails("setup"):
            raise AgentError("NIXL_ERR_BACKEND")
        handle, reads = self._network.handle(), operation == "READ"
        self.prepare(handle, reads, local, here, remote, there, notif_msg)
        pairs = []
        for one, other in zip(here, there, strict=True):
            address, size, _ = (int(each) for each in mine[one])
            far, _, _ = (int(each) for each in theirs[other])
            pairs.append((far, address, size) if reads else (address, far, size))
        self._transfers[handle] = Transfer(peer, reads, pairs, notif_msg)
        return handle

    def prepare(self, handle: int, reads: bool, local: int, here: Any, remote: int, there: Any, notice: bytes) -> None:
        """Check a transfer. Raise AgentError if a descriptor is unknown or the lists differ in length or bytes."""
        mine, theirs = self._lists[local][1], self._lists[remote][1]
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
        """Begin a transfer. Raise AgentError if the peer has ended. A failed read leaves garbage, as in nixl 1.5.1."""
        if not self._reaches(transfer.peer):
            spoil(transfer.pairs if transfer.reads else ())
            raise AgentError(GONE)

    def check_xfer_state(self, handle: int) -> str:
        state = self._transfers[handle].state
        if state == GONE:
            raise AgentError(state)
        return state

    def get_xfer_telemetry(self, handle: int) -> None: ...

    def release_xfer_handle(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    @property
    def in_flight(self) -> bool:
        return any(transfer.state == "PROC" for transfer in self._transfers.values())

    def arrive(self, now: int) -> None:
        """End the transfers that are due. A transfer fails if its peer has ended."""
        for handle, transfer in self._transfers.items():
            if transfer.state == "PROC" and transfer.copy.due <= now:
                self.finish(handle, transfer)

    def finish(self, handle: int, transfer: Transfer) -> None:
        """Move the bytes and deliver the notice. If the peer has ended, the transfer fails, and a read gets garbage."""
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

    def send_notif(self, agent: str, notif_msg: bytes = b"") -> None:
        if agent in self._peers and self._reaches(agent) and self._network.fails("notice"):
            raise AgentError("NIXL_ERR_BACKEND")
        self.notify(agent, notif_msg)

    def notify(self, agent: str, notice: bytes) -> None:
        """Deliver a notice to the peer. Raise AgentError if the peer is unknown or has ended."""
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


class Network(PairNetwork):
    """Holds the agents by name, the handshake listeners, the handshakes in flight and the writers."""

    agent_class: type[Agent] = Agent

    def __init__(self, delay: int) -> None:
        super().__init__(delay)
        self.agents: dict[str, Agent] = {}
        #: {host:port: function of the thread that answers handshakes}
        self.listeners: dict[str, Callable[[], None]] = {}
        #: _asked: the message for the listener's thread. _said: the thread's answer.
        self._asked, self._said = b"", list[bytes]()
        self._writers: list[_Writer] = []
        self._handshakes: list[tuple[int, Context, Future[Any], Callable[[], Any]]] = []
        self.handle: Callable[[], int] = partial(next, itertools.count(1))
        self._names = itertools.count(1)

    def agent(self, _: str, config: Any = None) -> Agent:
        """Replaces `nixl_agent`. Numbers the agents, because vLLM's random names differ between runs."""
        name = f"agent-{next(self._names)}"
        self.agents[name] = made = self.agent_class(self, name)
        return made

    @property
    def busy(self) -> bool:
        agents = any(agent.in_flight or agent.notices for agent in self.agents.values())
        return agents or bool(self._handshakes) or any(writer.is_woken for writer in self._writers)

    def tick(self) -> None:
        self.now += 1
        due = [each for each in self._handshakes if each[0] <= self.now]
        self._handshakes = [each for each in self._handshakes if each[0] > self.now]
        for _, context, future, work in due:
            context.run(_settle, future, work)
        for agent in list(self.agents.values()):
            agent.arrive(self.now)
        self.write()

    def time_passes(self) -> None:
        agents = list(self.agents.values())
        for agent in agents:
            agent.arrive(self.now + self.delay + max(each.late for each in agents))

    def write(self) -> None:
        for writer in self._writers:
            writer.go_on(self.now)

    def writer(self, **thread: Any) -> "_Writer":
        """Replaces the creation of a writer thread."""
        made = _Writer(self, thread["target"])
        self._writers.append(made)
        return made

    def executor(self) -> Any:
        """Replaces the thread that makes the handshakes of one worker."""

        def submit(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            due = self.now + self.handshake_steps
            self._handshakes.append((due, copy_context(), future, partial(work, *arguments)))
            return future

        return SimpleNamespace(submit=submit, shutdown=nothing)

    @contextmanager
    def socket(self, kind: Any, path: str) -> Iterator[Any]:
        """Replaces `zmq_ctx`. Yields a socket for a worker that begins a handshake, or for the thread that answers."""
        messages = [self._asked] if kind == zmq.ROUTER else []

        def receive() -> Any:
            if kind != zmq.ROUTER:
                return self.ask(path.removeprefix("tcp://"), messages[-1])
            if not messages:
                raise zmq.Again
            return b"worker", b"", messages.pop()

        made = SimpleNamespace(setsockopt=nothing, send=messages.append, recv_multipart=receive)
        made.send_multipart = lambda parts: self._said.extend(parts[2:])
        yield made

    def listen(self, **thread: Any) -> Any:
        """Replaces the thread that answers handshakes. The stop event is set, so the thread's loop runs only once."""
        *arguments, ready, _, host, port = thread["args"]
        stopped = SimpleNamespace(is_set=lambda: True)
        listener = partial(thread["target"], *arguments, ready, stopped, host, port)
        self.listeners[f"{host}:{port}"] = partial(copy_context().run, listener)
        return SimpleNamespace(start=ready.set, join=nothing)

    def ask(self, address: str, message: bytes) -> list[bytes]:
        """Return the answer of the listener at this address. A listener that raises never answers again."""
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


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  the worker gets the error
        future.set_exception(error)


class _Waits(Exception):
    """Raised where a thread would wait, to end the current iteration of the thread's loop."""


class Signal(threading.Event):
    """Replaces `threading.Event` in the writer thread. `wait` ends the current iteration of the loop."""

    def wait(self, timeout: float | None = None) -> bool:
        raise _Waits


class _Writer:
    """Replaces push mode's writer thread. `go_on` runs the loop if the thread is woken or has blocks to write."""

    def __init__(self, network: Network, loop: Any) -> None:
        self._network = network
        self._loop = loop
        self._context = copy_context()
        self._woken_at: int | None = None

    @property
    def is_woken(self) -> bool:
        worker = self._loop.__self__
        return not worker._push_writer_stop.is_set() and worker._push_writer_wake.is_set()

    def go_on(self, now: int) -> None:
        worker = self._loop.__self__
        if worker._push_writer_stop.is_set() or not (self.is_woken or worker._push_finished_blocks):
            return
        if self._woken_at is None:
            self._woken_at = now
        if now - self._woken_at < self._network.writers_take:
            return
        self._woken_at = None
        worker._push_writer_wake.clear()
        with suppress(_Waits):
            self._context.run(self._loop)

    start = join = staticmethod(nothing)
