"""The network between two engines with MooncakeConnector. The lab's steps and clock drive vLLM's own coroutines."""

import asyncio
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import torch
import zmq

from kvfix import clock
from kvfix_tools.lab.connectors.connector import Nothing, nothing
from kvfix_tools.lab.connectors.nixl import AnyBlockSize
from kvfix_tools.lab.engine.byte_memory import Copy
from kvfix_tools.lab.pair.pair_engine import PairNetwork
from kvfix_tools.ledger import WriteBegun, WriteEnded

#: Port of a producer's bootstrap server.
PORT = 8998
_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


class Loop(asyncio.SelectorEventLoop):
    """An event loop with the lab's clock. The loop runs the callbacks that are due, and never waits."""

    host: "Host"

    def time(self) -> float:
        return clock.now()

    def _check_closed(self) -> None:
        """Allow calls to a closed loop, because a coroutine that ends with its engine may still call the loop."""

    def go_on(self) -> None:
        for _ in range(10_000):  # more rounds of the loop than a step needs
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                return


class Host:
    """The host of one engine. A restarted engine gets a new host. session: address of Mooncake's transfer engine."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network = network
        self.name = name
        self.loop = Loop()
        self.loop.host = self
        self.loop.set_exception_handler(lambda _, what: self.side.raised(what.get("exception") or Exception()))
        self.session = f"{name}:{network.port()}"
        network.hosts[self.session] = self
        self.alive = True
        #: The connector of the engine.
        self.side: Any

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
        """Replace `asyncio.run_coroutine_threadsafe`. Run the loop at once, because no other thread runs the loop."""
        done = asyncio.run_coroutine_threadsafe(work, self.loop)
        done.add_done_callback(self._ended)
        self.loop.go_on()
        return done

    def _ended(self, work: Future[Any]) -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self.side.raised(error)


class Write(NamedTuple):
    """A write in flight. requests: pairs (producer's request, consumer's request). ended: called with the result."""

    of: Host
    to: str
    copy: Copy
    requests: list[tuple[str, str]]
    ended: Callable[[int], None]


class Network(PairNetwork):
    """Messages and transfers (writes) in flight. timeout: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, in seconds."""

    def __init__(self, delay: int, timeout: float) -> None:
        super().__init__(delay)
        self.timeout = timeout
        #: {address of a transfer engine: its host}
        self.hosts: dict[str, Host] = {}
        #: bound: {tcp://host:port: bound socket}. bootstrap: {http://host:port: bootstrap server}.
        self.bound: dict[str, Router] = {}
        self.bootstrap: dict[str, Any] = {}
        #: {request: how often the router has sent the request}. The transfer id contains this number.
        self.transfers: dict[str, int] = {}
        #: The requests of the next write (`Write.requests`).
        self.requests: list[tuple[str, str]] = []
        self._messages: list[tuple[int, Host, Callable[[], None]]] = []
        self._writes: list[Write] = []
        self.port: Callable[[], int] = partial(next, itertools.count(1000))

    @property
    def longest(self) -> float:
        """Return how many seconds a consumer waits for an answer."""
        return self.timeout + 60

    @property
    def busy(self) -> bool:
        return bool(self._messages or self._writes)

    def tick(self) -> None:
        self.now += 1
        self._arrive(self.now)
        for host in list(self.hosts.values()):
            host.loop.go_on()
            host.side.look()

    def time_passes(self) -> None:
        self._arrive(self.now + self.delay)

    def _arrive(self, now: int) -> None:
        messages = [each for each in self._messages if each[0] <= now]
        self._messages = [each for each in self._messages if each[0] > now]
        for _, host, deliver in messages:
            if host.alive:
                deliver()
        writes = [each for each in self._writes if each.copy.due <= now]
        self._writes = [each for each in self._writes if each.copy.due > now]
        for write in writes:
            self._end(write)

    def send(self, host: Host, deliver: Callable[[], None]) -> None:
        """Send a message to this host. If the host has ended before the message arrives, the message is lost."""
        self._messages.append((self.now + self.handshake_steps, host, deliver))

    def write(self, of: Host, send: Any, to: str, *pieces: list[int]) -> Future[int]:
        """Begin a write. pieces: sources, targets, sizes. When the write ends, the future gets the result of `send`."""
        done: Future[int] = Future()

        def ended(answer: int) -> None:
            send.__self__.engine.answer = answer
            done.set_result(send(to, *pieces))

        requests, self.requests = self.requests, []
        for kept, reader in requests:
            self.add(WriteBegun(kept, reader))
        self._writes.append(Write(of, to, Copy(zip(*pieces, strict=True), self.now + self.delay), requests, ended))
        return done

    def _end(self, write: Write) -> None:
        failed = self.fails("transfer") or not write.of.alive or write.to not in self.hosts
        if not failed:
            write.copy.arrive()
        for kept, _ in write.requests:
            self.add(WriteEnded(kept))
        if write.of.alive:
            write.ended(-1 if failed else 0)


def asyncio_module(host: Host) -> Any:
    """Return a copy of the module asyncio with the host's event loop, which runs in the lab's steps."""

    async def wait(tasks: Sequence[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        """Return lists of tasks in the order of `tasks`. asyncio returns sets, whose order differs between runs."""
        done, pending = await asyncio.wait(tasks, **options)
        return [each for each in tasks if each in done], [each for each in tasks if each in pending]

    replaced: dict[str, Any] = {"new_event_loop": lambda: host.loop, "wait": wait}
    replaced["run_coroutine_threadsafe"] = lambda work, loop: loop.host.run(work)
    return SimpleNamespace(**{**vars(asyncio), **replaced})


class Router:
    """Replaces the producer's ROUTER socket."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._came: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._asking: dict[bytes, Dealer] = {}

    def bind_to_random_port(self, address: str) -> int:
        port = self.host.network.port()
        self.host.network.bound[f"tcp://{self.host.name}:{port}"] = self
        return port

    def take(self, dealer: "Dealer", message: bytes) -> None:
        self._asking[dealer.name] = dealer
        self._came.put_nowait((dealer.name, message))

    async def recv_multipart(self) -> tuple[bytes, bytes]:
        return await self._came.get()

    async def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        dealer, message = self._asking[parts[0]], parts[1]
        self.host.network.send(dealer.host, lambda: dealer.take(message))

    def close(self) -> None: ...


class Dealer:
    """Replaces the consumer's DEALER socket."""

    def __init__(self, host: Host, address: str) -> None:
        self.host, self._address = host, address
        self.name = f"{host.session} {host.network.port()}".encode()
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._timeout = 0.0

    def setsockopt(self, option: int, value: float) -> None:
        self._timeout = value / 1000

    def take(self, message: bytes) -> None:
        self._came.put_nowait(message)

    async def send(self, message: bytes) -> None:
        """Send a message. The message is lost if no socket is bound to the address."""
        bound = self.host.network.bound.get(self._address)
        if bound is not None:
            self.host.network.send(bound.host, lambda: bound.take(self, message))

    async def recv(self) -> bytes:
        try:
            return await asyncio.wait_for(self._came.get(), self._timeout)
        except asyncio.TimeoutError:
            raise zmq.Again from None


def transport(network: Network) -> httpx.MockTransport:
    """Return an HTTP transport through which vLLM's own bootstrap servers answer without a socket."""

    async def answer(request: httpx.Request) -> httpx.Response:
        server, asks = network.bootstrap.get(f"http://{request.url.netloc.decode()}"), request.url.path == "/query"
        if server is None or (asks and network.fails("handshake")):
            raise httpx.ConnectError("refused")
        if asks:
            content = {number: dataclasses.asdict(each) for number, each in (await server.query()).items()}
        else:
            content = await server.register_worker(server.payload(**json.loads(request.content)))
        return httpx.Response(200, json=content)

    return httpx.MockTransport(answer)


def replace(host: Host) -> None:
    """Replace the imports of MooncakeConnector's module, so that the next engine runs on this host."""
    module: Any = import_module(_MODULE)
    network = host.network
    module.time = SimpleNamespace(perf_counter=lambda: clock.now(), monotonic=lambda: clock.now())
    module.asyncio = asyncio_module(host)
    module.threading = SimpleNamespace(Thread=Nothing, Event=threading.Event)
    threads = SimpleNamespace(submit=lambda *work: network.write(host, *work), shutdown=nothing)
    module.ThreadPoolExecutor = lambda **_: threads
    context = SimpleNamespace(host=host, socket=lambda _: Router(host), term=nothing)
    sockets = SimpleNamespace(Context=lambda: context, Socket=Router)
    module.zmq = SimpleNamespace(**{**vars(zmq), "asyncio": sockets})
    module.make_zmq_socket = lambda context, address, *_, **__: nullcontext(Dealer(context.host, address))
    client = partial(httpx.AsyncClient, transport=transport(network))
    module.httpx = SimpleNamespace(**{**vars(httpx), "AsyncClient": client})
    # engine.answer: the transfer engine's return value for the write that has just ended
    engine = SimpleNamespace(answer=0, initialize=lambda *_: 0, batch_register_memory=lambda *_: 0)
    engine.get_rpc_port = lambda: int(host.session.rpartition(":")[2])
    engine.batch_transfer_sync_write = lambda *_: engine.answer
    module.TransferEngine = lambda: engine
    module.get_ip = lambda: host.name
    module.envs = SimpleNamespace(VLLM_MOONCAKE_CONNECTOR_TIMEOUT=5)
    module.envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = network.timeout
    module.torch = SimpleNamespace(accelerator=SimpleNamespace(current_device_index=lambda: 0), Tensor=torch.Tensor)
    module.current_platform = SimpleNamespace(set_device=lambda _: None)
    module.get_tensor_model_parallel_rank = lambda: 0
    module.get_tensor_model_parallel_world_size = lambda: 1
    module.get_pp_group = lambda: SimpleNamespace(rank_in_group=0)
    module.get_current_attn_backends = lambda *_: [AnyBlockSize]
    module.get_mooncake_bootstrap_addr = lambda config: (config.kv_transfer_config.engine_id.partition("-")[0], PORT)
    registry = import_module(_MODULE.replace("mooncake_connector", "mooncake_utils"))

    class Bootstrap(registry.MooncakeBootstrapServer):  # type: ignore[misc, name-defined]
        payload = registry.RegisterWorkerPayload

        def start(self, **_: Any) -> None:
            network.bootstrap[f"http://{host.name}:{self.port}"] = self

        def shutdown(self) -> None: ...

    module.MooncakeBootstrapServer = Bootstrap
