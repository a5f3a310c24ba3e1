"""The network between two engines with NixlConnector: agents, sockets of the handshake, and threads.

All of them run in the lab's steps, so that a schedule plays the same way each time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import zmq

from kvfix_tools.lab.connectors.connector import nothing
from kvfix_tools.lab.connectors.nixl_agent import Agent
from kvfix_tools.lab.pair.pair_engine import PairNetwork


class Network(PairNetwork):
    """The agents by name, the listeners for handshakes, and the messages and transfers in flight.

    counts: counters of real NIXL (nixl_real.py).
    """

    agent_class: type[Agent] = Agent

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
        self.agents[name] = made = self.agent_class(self, name)
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
        """Replaces `zmq_ctx`: the socket of the worker that begins a handshake, or of the thread that answers one."""
        messages = [self._asked] if kind == zmq.ROUTER else []

        def next_message() -> tuple[bytes, bytes, bytes]:
            if not messages:
                raise zmq.Again
            return b"worker", b"", messages.pop()

        if kind == zmq.ROUTER:
            answer = lambda parts: self._said.extend(parts[2:])  # noqa: E731
            yield SimpleNamespace(setsockopt=nothing, recv_multipart=next_message, send_multipart=answer)
        else:
            ask = lambda: self.ask(path.removeprefix("tcp://"), messages[-1])  # noqa: E731
            yield SimpleNamespace(setsockopt=nothing, send=messages.append, recv_multipart=ask)

    def listen(self, **thread: Any) -> Any:
        """Replaces the thread that answers handshakes.

        Its stop event is already set, so it answers one message and ends.
        """
        *arguments, ready, _, host, port = thread["args"]
        stopped = SimpleNamespace(is_set=lambda: True)
        listener = partial(thread["target"], *arguments, ready, stopped, host, port)
        self.listeners[f"{host}:{port}"] = partial(copy_context().run, listener)
        return SimpleNamespace(start=ready.set, join=nothing)

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


class _Waits(Exception):
    """Ends a round of a thread's loop: the thread waits."""


class Signal(threading.Event):
    """Replaces the events of the writer thread."""

    def wait(self, timeout: float | None = None) -> bool:
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

    start = join = staticmethod(nothing)
