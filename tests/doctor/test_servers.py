"""The LMCache server of the multi-process connector: absent, of another release, of another mode; and ports in use."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.doctor import servers
from kvfix_tools.doctor.command_line import Command
from tests.doctor.sites import MP, V1, look, problems, say, serve, site


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextmanager
def http(answers: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in answers
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def mp(port: int, *more: str, **extra: Any) -> list[str]:
    return serve(MP, *more, extra={"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port, **extra})


def test_no_server(place: Path, closed: int) -> None:
    found = problems(look(mp(closed), place), "server")
    assert f"no LMCache server answers at tcp://localhost:{closed}: Connection refused" in found[0].what
    assert f"lmcache server --port {closed}" in found[0].do


def test_the_connector_starts_its_server_itself(place: Path, closed: int) -> None:
    assert problems(look(mp(closed, **{"lmcache.mp.autostart": True}), place), "server") == []


def test_a_server_that_does_not_tell_its_release(place: Path, listening: int) -> None:
    assert [line.status for line in say(look(mp(listening), place), "server")] == ["ok", "unchecked"]


@pytest.mark.parametrize(("release", "count"), [("0.5.6-g3e11e108", 0), ("0.5.4-gabc", 1)])
def test_the_release_of_a_server(release: str, count: int, place: Path, listening: int) -> None:
    with http({"/version": release}) as address:
        found = problems(look(mp(listening), place, server_http=address), "server")
    assert len(found) == count
    assert all("is LMCache 0.5.4, the connector LMCache 0.5.6" in line.what for line in found)


def test_the_options_of_a_server(place: Path, listening: int) -> None:
    """As `GET /config` of LMCache 0.5.6 has them."""
    config = {"mp": {"chunk_size": 100, "supported_transfer_mode": "lmcache_driven"}, "storage_manager": {}}
    with http({"/config": config}) as address:
        words = mp(listening, "--block-size", "16", **{"lmcache.mp.mp_transfer_mode": "engine_driven"})
        setup = look(words, place, server_http=address)
        modes, chunks = problems(setup, "transfer-mode"), problems(setup, "chunk-size")
    assert "the worker asks for engine_driven" in modes[0].what
    assert "--supported-transfer-mode auto; kvfix explain KVF902" in modes[0].do
    assert "--chunk-size of the LMCache server 100 is not a multiple of vLLM's block size 16" in chunks[0].what


@pytest.mark.parametrize(("cuda", "supported", "count"), [("None", "", 1), ("None", "auto", 0), ("'13.0'", "", 0)])
def test_a_worker_without_a_gpu(
    cuda: str, supported: str, count: int, tmp_path: Path, listening: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of LMCache 0.5.6 takes lmcache_driven only, unless its command line has another mode."""
    options = {"port": str(listening), **({"supported-transfer-mode": supported} if supported else {})}
    monkeypatch.setattr(servers, "running", lambda port: Command("lmcache server", "", options, {}, False, ""))
    here = site(tmp_path, vllm=False)
    (here / "torch").mkdir()
    (here / "torch/version.py").write_text(f"cuda = {cuda}\nhip = None\n")
    assert len(problems(look(mp(listening), here), "transfer-mode")) == count


CONTROLLER = {f"lmcache.controller_{name}_url": "localhost:{}" for name in ("pull", "reply")}


@pytest.mark.parametrize(
    ("check", "settings"),
    [
        ("remote-store", {"lmcache.remote_url": "redis://:hunter2@localhost:{}"}),
        ("remote-store", {"lmcache.remote_url": "lm://localhost:{}"}),
        ("controller", CONTROLLER),
    ],
)
def test_what_does_not_answer(check: str, settings: dict[str, str], place: Path, closed: int, listening: int) -> None:
    def found(port: int) -> list[str]:
        urls = {name: url.format(port) for name, url in settings.items()}
        setup = look(serve(V1, extra={"lmcache.enable_controller": check == "controller", **urls}), place)
        return [line.what for line in problems(setup, check)]

    assert found(listening) == []
    assert len(found(closed)) == len(settings)
    assert all("does not answer" in what and "hunter2" not in what for what in found(closed))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("-NOAUTH Authentication required.", "refuses commands: NOAUTH"),
        ("-LOADING Redis is loading the dataset in memory", "refuses commands: LOADING"),
        ("-MISCONF Redis is configured to save RDB snapshots", "refuses commands: MISCONF"),
        ("+PONG", "refuses commands: READONLY"),
    ],
)
def test_a_store_that_refuses(answer: str, says: str, place: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:

        def refuse() -> None:
            for _ in range(2):  # the check connects, then sends PING, and INFO after PONG
                connection, _ = server.accept()
                with connection:
                    while word := connection.recv(64):
                        role = "$30\r\n# Replication\r\nrole:slave\r\n"
                        connection.sendall(f"{role if word.startswith(b'INFO') else answer}\r\n".encode())

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        url = f"redis://localhost:{server.getsockname()[1]}"
        found = problems(look(serve(V1, extra={"lmcache.remote_url": url}), place), "remote-store")
        thread.join(30)
    assert [says in line.what for line in found] == [True]


def test_a_port_that_is_taken(place: Path, listening: int, closed: int) -> None:
    words = ["vllm", "serve", "m", "--host", "127.0.0.1", "--port"]
    found = problems(look([*words, str(listening)], place), "listens")
    assert f"port {listening} (--port) is in use" in found[0].what
    assert problems(look([*words, str(closed)], place), "listens") == []


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("tcp://localhost:5555", "localhost", 5555),
        ("grpc://10.0.0.1:1", "10.0.0.1", 1),
        ("host:2", "host", 2),
        ("tcp://[::1]:3", "::1", 3),
        ("redis://user:pass@h:4/0", "h", 4),
        ("tcp://localhost", "localhost", None),
    ],
)
def test_addresses(url: str, host: str, port: int | None) -> None:
    assert servers.address(url) == (url, host, port)
