"""The network between two engines with MooncakeConnector, with a stand-in for Mooncake's transfer engine.

The transfer engine writes from one engine's memory to the other's, as mooncake.engine.TransferEngine does. A write
takes some steps (byte_memory.py). vLLM's own coroutines run in event loops that use the lab's steps and time
(mooncake_sockets.py), without threads, sockets or HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import clock
from kvfix_tools.lab.engine.byte_memory import Copy
from kvfix_tools.lab.pair.pair_network import PairNetwork

if TYPE_CHECKING:
    from kvfix_tools.lab.connectors.mooncake_sockets import Router

#: Maximum rounds of a loop in one step.
_MOST = 10_000


class Loop(asyncio.SelectorEventLoop):
    """An event loop with the lab's time. It runs the callbacks that are due, and never waits."""

    def time(self) -> float:
        return clock.now()

    def _check_closed(self) -> None:
        """Do nothing: coroutines that end with their engine may still call the loop."""

    def go_on(self) -> None:
        for _ in range(_MOST):
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                return


class Host:
    """The host of one engine, from its start to its end. session: the address of its transfer engine."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.loop = Loop()
        self.loop.set_exception_handler(lambda _, what: self.raised(what.get("exception") or Exception()))
        self.session = f"{name}:{network.port()}"
        self.alive = True
        #: Called with the exception of a coroutine that no code waits for.
        self.raised: Callable[[BaseException], None] = lambda _: None
        #: Called in each step, after all messages that are due have arrived.
        self.look: Callable[[], None] = lambda: None

    def end(self) -> None:
        self.alive = False
        for places in (self.network.bound, self.network.bootstrap):
            for address in [each for each in places if each.split("//")[1].partition(":")[0] == self.name]:
                del places[address]
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.go_on()
        self.loop.close()
        del self.network.hosts[self.session]

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Replace `asyncio.run_coroutine_threadsafe`: begin at once, because the thread of the loop is idle."""
        done: Future[Any] = Future()

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                done.cancel()
                return
            error = task.exception()
            if error is None:
                done.set_result(task.result())
            else:
                self.raised(error)
                done.set_exception(error)

        self.loop.create_task(work).add_done_callback(ended)
        self.loop.go_on()
        return done


class Write(NamedTuple):
    """A write in flight. requests: (request of the producer, request of the consumer) of each load in it."""

    due: int
    future: Future[int]
    of: Host
    to: str
    copy: Copy
    requests: list[tuple[str, str]]


class Network(PairNetwork):
    """Messages and transfers in flight. A transfer is a write, a handshake is a request to the bootstrap server.

    timeout: seconds, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
    """

    def __init__(self, delay: int, timeout: float) -> None:
        super().__init__(delay)
        self.timeout = timeout
        #: {address of a transfer engine: its host}
        self.hosts: dict[str, Host] = {}
        #: {tcp://host:port: the bound socket; http://host:port: the bootstrap server}
        self.bound: dict[str, Router] = {}
        self.bootstrap: dict[str, Any] = {}
        #: {request: how often the router has sent it}. Each transfer has a new id.
        self.transfers: dict[str, int] = {}
        #: Called for each write with ("begun", "ended" or "failed", request of the producer, request of the consumer).
        self.noted: Callable[[str, str, str], None] = lambda *_: None
        #: The requests of the next write.
        self.requests: list[tuple[str, str]] = []
        self._messages: list[tuple[int, Host, Callable[[], None]]] = []
        self._writes: list[Write] = []
        self._ports = itertools.count(1000)

    @property
    def longest(self) -> float:
        """Seconds that a consumer waits for an answer."""
        return self.timeout + 60

    @property
    def busy(self) -> bool:
        return bool(self._messages or self._writes)

    def port(self) -> int:
        return next(self._ports)

    def host(self, name: str) -> Host:
        """Return the host of a new engine."""
        made = Host(self, name)
        self.hosts[made.session] = made
        return made

    def tick(self) -> None:
        self.now += 1
        self._arrive(self.now)
        for host in list(self.hosts.values()):
            host.loop.go_on()
            host.look()

    def time_passes(self) -> None:
        self._arrive(self.now + self.delay)

    def _arrive(self, now: int) -> None:
        messages = [each for each in self._messages if each[0] <= now]
        self._messages = [each for each in self._messages if each[0] > now]
        for _, host, deliver in messages:
            if host.alive:
                deliver()
        writes = [each for each in self._writes if each.due <= now]
        self._writes = [each for each in self._writes if each.due > now]
        for write in writes:
            self._end(write)

    def send(self, host: Host, deliver: Callable[[], None]) -> None:
        """Send a message to this host. The message is lost if the host has ended when it arrives."""
        self._messages.append((self.now + self.handshake_steps, host, deliver))

    # ------------------------------------------------------------------ writes

    def write(self, of: Host, to: str, sources: list[int], targets: list[int], sizes: list[int]) -> Future[int]:
        """Write, and return a future with the answer of the transfer engine."""
        future: Future[int] = Future()
        requests, self.requests = self.requests, []
        for pair in requests:
            self.noted("begun", *pair)
        copy = Copy(zip(sources, targets, sizes, strict=True))
        self._writes.append(Write(self.now + self.delay, future, of, to, copy, requests))
        return future

    def _end(self, write: Write) -> None:
        failed = self.fails("transfer") or not write.of.alive or write.to not in self.hosts
        if not failed:
            write.copy.arrive()
        for pair in write.requests:
            self.noted("failed" if failed else "ended", *pair)
        if write.of.alive:
            write.future.set_result(-1 if failed else 0)


class Executor:
    """Replaces the threads that call the transfer engine and wait for the write."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def submit(self, send: Any, session: str, sources: list[int], targets: list[int], sizes: list[int]) -> Future[int]:
        """Begin a write, and call `send` (`_send_blocks`) at its end."""
        done: Future[int] = Future()

        def ended(answer: Future[int]) -> None:
            send.__self__.engine.answer = answer.result()
            done.set_result(send(session, sources, targets, sizes))

        self._host.network.write(self._host, session, sources, targets, sizes).add_done_callback(ended)
        return done

    def shutdown(self, wait: bool = True) -> None: ...


class TransferEngine:
    """A stand-in for mooncake.engine.TransferEngine. answer: the result of the write that has just ended."""

    answer = 0

    def __init__(self, host: Host) -> None:
        self._host = host

    def initialize(self, host: str, *_: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return int(self._host.session.rpartition(":")[2])

    def batch_register_memory(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        return 0

    def batch_transfer_sync_write(self, *_: Any) -> int:
        return self.answer
