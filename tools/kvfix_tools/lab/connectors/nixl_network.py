"""The network between two engines with NixlConnector: agents, sockets of the handshake, and threads.

All of them run in the lab's steps, so that a schedule plays the same way each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import zmq

from kvfix_tools.lab.connectors.nixl_agent import Agent
from kvfix_tools.lab.pair.pair_network import PairNetwork


class Network(PairNetwork):
    """The agents by name, the listeners for handshakes, and the messages and transfers in flight.

    counts: counters of real NIXL (nixl_real.py).
    """

    def __init__(self, delay: int) -> None:
        super().__init__(delay)
        self.agents: dict[str, Agent] = {}
        #: {host:port: function of the thread that answers handshakes}
        self.listeners: dict[str, Callable[[], None]] = {}
        #: The message for the listener's thread, and the thread's answer.
        self._asked, self._said = b"", list[bytes]()
        self._writers: list[_Writer] = []
        self._handshakes: list[tuple[int, Context, Future[Any], Callable[[], Any]]] = []
        self._handles = itertools.count(1)
        self._names = itertools.count(1)

    def agent(self, _: str, config: Any = None) -> Agent:
        """Replaces `nixl_agent`, with a fixed name instead of vLLM's random one."""
        name = f"agent-{next(self._names)}"
        self.agents[name] = made = Agent(self, name)
        return made

    def handle(self) -> int:
        return next(self._handles)

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
        latest = self.now + self.delay + max(agent.late for agent in self.agents.values())
        for agent in list(self.agents.values()):
            agent.arrive(latest)

    def write(self) -> None:
        """Run the writer threads that were woken."""
        for writer in self._writers:
            writer.go_on(self.now)

    def writer(self, **thread: Any) -> _Writer:
        """Replaces the creation of a writer thread."""
        made = _Writer(self, thread["target"])
        self._writers.append(made)
        return made

    # ------------------------------------------------------------------ the handshake

    def executor(self) -> Any:
        """Replaces the thread that makes the handshakes of one worker."""
        return _Executor(self)

    def shake_hands(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._handshakes.append((self.now + self.handshake_steps, copy_context(), future, work))
        return future

    @contextmanager
    def socket(self, kind: Any, path: str) -> Iterator[Any]:
        """Replaces `zmq_ctx`."""
        yield _Listening(self) if kind == zmq.ROUTER else _Asking(self, path.removeprefix("tcp://"))

    def listen(self, **thread: Any) -> _Thread:
        """Replaces the thread that answers handshakes."""
        *arguments, ready, _, host, port = thread["args"]
        listener = partial(thread["target"], *arguments, ready, _Stopped, host, port)
        self.listeners[f"{host}:{port}"] = partial(copy_context().run, listener)
        return _Thread(ready)

    def ask(self, address: str, message: bytes) -> list[bytes]:
        """Return the answer of the listener at this address. If the listener's thread raises an exception, the thread
        ends and never answers again.
        """
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
    except Exception as error:  # noqa: BLE001  the worker gets it
        future.set_exception(error)


class _Executor:
    def __init__(self, network: Network) -> None:
        self._network = network

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._network.shake_hands(lambda: function(*arguments))

    def shutdown(self, wait: bool = True) -> None: ...


class _Stopped:
    """Replaces the event that ends the thread. The thread reads it when no message is left."""

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
    """The socket of the worker that begins a handshake."""

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
    """The socket of the thread that answers a handshake, with one message."""

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


class _Waits(Exception):
    """Ends a round of a thread's loop: the thread waits."""


class Signal:
    """Replaces the events of the writer thread."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> None:
        raise _Waits


class _Writer:
    """Replaces the writer thread of push mode. The writer makes one round when it is woken, and one round in each step
    while it polls.

    loop: NixlPushConnectorWorker._push_writer_loop.
    """

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

    def start(self) -> None: ...

    def join(self, timeout: float = 0) -> None: ...
