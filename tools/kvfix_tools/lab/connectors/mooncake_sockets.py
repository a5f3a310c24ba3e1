"""Replacements for the modules that MooncakeConnector's coroutines communicate with: asyncio's threads, zmq, httpx.

`replace` sets them in the module of the connector.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import httpx
import torch
import zmq

from kvfix import clock
from kvfix_tools.lab.connectors.connector import Nothing, nothing
from kvfix_tools.lab.connectors.mooncake_network import Executor, Host, Network, TransferEngine
from kvfix_tools.lab.connectors.nixl import AnyBlockSize

#: Port of a producer's bootstrap server.
PORT = 8998
_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


class Asyncio:
    """asyncio with loops that run in the lab's steps."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def new_event_loop(self) -> Any:
        self._host.loop.host = self._host  # type: ignore[attr-defined]
        return self._host.loop

    def run_coroutine_threadsafe(self, work: Any, loop: Any) -> Any:
        return loop.host.run(work)

    async def wait(self, tasks: Sequence[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        """Return the tasks in their own order. A set has the order of their addresses, which differs between runs."""
        done, pending = await asyncio.wait(tasks, **options)
        return [each for each in tasks if each in done], [each for each in tasks if each in pending]

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


class Router:
    """The socket of the producer."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._came: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._asking: dict[bytes, Dealer] = {}

    def bind_to_random_port(self, address: str) -> int:
        port = self.host.network.port()
        self.host.network.bound[f"tcp://{self.host.name}:{port}"] = self
        return port

    def take(self, dealer: Dealer, message: bytes) -> None:
        self._asking[dealer.name] = dealer
        self._came.put_nowait((dealer.name, message))

    async def recv_multipart(self) -> tuple[bytes, bytes]:
        return await self._came.get()

    async def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        dealer, message = self._asking[parts[0]], parts[1]
        self.host.network.send(dealer.host, lambda: dealer.take(message))

    def close(self) -> None: ...


class Dealer:
    """The socket of the consumer."""

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
        """Send a message. A message to an unused address never arrives."""
        bound = self.host.network.bound.get(self._address)
        if bound is not None:
            self.host.network.send(bound.host, lambda: bound.take(self, message))

    async def recv(self) -> bytes:
        try:
            return await asyncio.wait_for(self._came.get(), self._timeout)
        except asyncio.TimeoutError:
            raise zmq.Again from None


def zmq_module(host: Host) -> Any:
    names = ("ROUTER", "DEALER", "RCVTIMEO", "Again", "ContextTerminated")
    context = SimpleNamespace(host=host, socket=lambda _: Router(host), term=nothing)
    replaced = SimpleNamespace(Context=lambda: context, Socket=Router)
    return SimpleNamespace(asyncio=replaced, **{name: getattr(zmq, name) for name in names})


@contextmanager
def make_zmq_socket(context: Any, address: str, *_: Any, **__: Any) -> Iterator[Dealer]:
    yield Dealer(context.host, address)


def httpx_module(network: Network) -> Any:
    """Return a replacement for httpx: vLLM's own bootstrap server answers without a socket."""

    class AsyncClient:
        def __init__(self, **_: Any) -> None: ...

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: Any) -> None: ...

        async def post(self, url: str, json: Any) -> Any:
            server = self._server(url, "/register")
            return _answer(await server.register_worker(server.payload(**json)))

        async def get(self, url: str) -> Any:
            server = self._server(url, "/query")
            if network.fails("handshake"):
                raise httpx.ConnectError("refused")
            return _answer({number: dataclasses.asdict(each) for number, each in (await server.query()).items()})

        @staticmethod
        def _server(url: str, path: str) -> Any:
            server = network.bootstrap.get(url.removesuffix(path))
            if server is None:
                raise httpx.ConnectError("refused")
            return server

    kept = ("ConnectError", "TimeoutException", "RequestError", "HTTPStatusError")
    return SimpleNamespace(AsyncClient=AsyncClient, **{name: getattr(httpx, name) for name in kept})


def _answer(content: Any) -> Any:
    text = json.dumps(content)
    return SimpleNamespace(json=lambda: json.loads(text), raise_for_status=lambda: None)


def replace(host: Host) -> None:
    """Replace the modules for the next engine, which is made on this host."""
    module: Any = import_module(_MODULE)
    network = host.network
    module.time = SimpleNamespace(perf_counter=lambda: clock.now(), monotonic=lambda: clock.now())
    module.asyncio = Asyncio(host)
    module.threading = SimpleNamespace(Thread=Nothing, Event=threading.Event)
    module.ThreadPoolExecutor = lambda **_: Executor(host)
    module.zmq = zmq_module(host)
    module.make_zmq_socket = make_zmq_socket
    module.httpx = httpx_module(network)
    module.TransferEngine = lambda: TransferEngine(host)
    module.get_ip = lambda: host.name
    module.envs = SimpleNamespace(
        VLLM_MOONCAKE_CONNECTOR_TIMEOUT=5, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=network.timeout
    )
    module.torch = SimpleNamespace(accelerator=SimpleNamespace(current_device_index=lambda: 0), Tensor=torch.Tensor)
    module.current_platform = SimpleNamespace(set_device=lambda _: None)
    module.get_tensor_model_parallel_rank = lambda: 0
    module.get_tensor_model_parallel_world_size = lambda: 1
    module.get_pp_group = lambda: SimpleNamespace(rank_in_group=0)
    module.get_current_attn_backends = lambda *_: [AnyBlockSize]
    module.get_mooncake_bootstrap_addr = lambda config: (
        config.kv_transfer_config.engine_id.partition("-")[0],
        PORT,
    )
    registry = import_module(_MODULE.replace("mooncake_connector", "mooncake_utils"))

    class Bootstrap(registry.MooncakeBootstrapServer):  # type: ignore[misc, name-defined]
        """vLLM's bootstrap server without a socket."""

        payload = registry.RegisterWorkerPayload

        def start(self, **_: Any) -> None:
            network.bootstrap[f"http://{host.name}:{self.port}"] = self

        def shutdown(self) -> None: ...

    module.MooncakeBootstrapServer = Bootstrap
