"""Make installations (links to packages) and hosts (folders of text files) for the tests of kvfix doctor."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvfix import installed_source
from kvfix_tools.doctor import checks, command_line
from kvfix_tools.doctor.checks import Line
from kvfix_tools.doctor.machine import Machine
from kvfix_tools.doctor.packages import Packages
from kvfix_tools.doctor.setup import Setup
from tests.conftest import RELEASES
from tests.engine import fake_redis

NEWEST = "0.5.6"
V1 = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MP = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}


def site(folder: Path, lmcache: str = NEWEST, vllm: bool = True) -> Path:
    """Link LMCache and the installed vLLM into a folder. The folder has no torch, so doctor starts no child process."""
    folder.mkdir(parents=True, exist_ok=True)
    if lmcache:
        for each in (RELEASES / lmcache).glob("lmcache*"):
            (folder / each.name).symlink_to(each)
    if vllm:
        package = installed_source.package_dir("vllm")
        if package is None:
            pytest.skip("vLLM is not installed")
        for each in [package, *package.parent.glob("vllm*.dist-info")]:
            (folder / each.name).symlink_to(each)
    return folder


def torch(place: Path, version: str = "2.13.0", cuda: str | None = None) -> Path:
    """Make a package torch that states a version and a CUDA version. The package has no `__init__.py`."""
    (place / "torch").mkdir(parents=True)
    (place / "torch/version.py").write_text(f"cuda: str | None = {cuda!r}\nhip = None\n")
    metadata = place / f"torch-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return place


def serve(transfer: dict[str, Any], *more: str, **extra: Any) -> list[str]:
    """Return a command `vllm serve`. Keyword arguments add keys to `transfer`. `extra` is kv_connector_extra_config."""
    given = {**transfer, **({"kv_connector_extra_config": extra.pop("extra")} if "extra" in extra else {}), **extra}
    return ["vllm", "serve", "org/model", "--kv-transfer-config", json.dumps(given), *more]


class Planted(NamedTuple):  # a row of planted.toml. The comment at the top of planted.toml describes the fields
    check: str
    what: str = ""
    do: str = ""
    do_without: str = ""
    status: str = checks.PROBLEM
    connector: str = "LMCacheConnectorV1"
    keys: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    options: str = ""
    command: str = ""
    environment: dict[str, str] = {}
    yaml: str = ""
    model: dict[str, Any] = {}
    lmcache: str = NEWEST
    vllm: bool = False
    machine: dict[str, Any] = {}
    python: list[int] = []
    http: dict[str, Any] = {}
    server_http: str = ""
    redis: str = ""

    @contextmanager
    def served(self) -> Iterator["Planted"]:
        with ExitStack() as stack:
            listening, closed = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
            ports = {"$LISTENING": listening.getsockname()[1], "$CLOSED": closed.getsockname()[1]}
            closed.close()
            if self.http:
                ports["$HTTP"] = stack.enter_context(http(self.http))
            if self.redis:
                ports["$REDIS"] = stack.enter_context(fake_redis.running(self.redis)).server_address[1]
            text = json.dumps(self._asdict())
            for name, port in ports.items():
                text = text.replace(name, str(port))
            yield Planted(**json.loads(text))

    def setup(self, folder: Path, place: Path) -> Setup:
        environment, words = dict(self.environment), [self.command]
        if not self.command:
            keys = {**self.keys, **({"extra": self.extra} if self.extra else {})}
            words = serve({**V1, "kv_connector": self.connector}, *self.options.split(), **keys)
        if self.model:
            (folder / "config.json").write_text(json.dumps(self.model))
            words[2] = str(folder)
        if self.lmcache != NEWEST:
            place = site(folder / "place", self.lmcache, vllm=self.vllm)
        if self.yaml:
            (folder / "lmcache.yaml").write_text(self.yaml)
            environment["LMCACHE_CONFIG_FILE"] = str(folder / "lmcache.yaml")
        where = machine(folder / "machine", **self.machine) if self.machine else None
        return look(words, place, where, environment, self.server_http)


@contextmanager
def http(answers: dict[str, Any]) -> Iterator[int]:
    """Serve a JSON answer for each path, as an LMCache server does. Yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


def machine(
    root: Path,
    memory_gib: float = 64,
    cgroup: dict[str, str] | None = None,
    text: str = "Linux",
    flags: str = "",
    locked_kib: int | None = None,
    shm_mib: int | None = None,
) -> Machine:
    """Make a host. cgroup: {path below `root`: file content}. flags: processor flags. locked_kib: 0 means no limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "dev/shm").mkdir(parents=True)
    (root / "proc/version").write_text(text)
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    (root / "proc/meminfo").write_text(f"MemTotal: {int(memory_gib * 2**20)} kB\nMemAvailable: {48 * 2**20} kB\n")
    for path, content in (cgroup or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    made = Machine(root)
    if locked_kib is not None:
        made.locked_memory = lambda: locked_kib * 1024 or None
    if shm_mib is not None:
        made.shared_memory = lambda: (shm_mib << 20, shm_mib << 20)
    return made


def look(
    words: list[str],
    place: Path,
    where: Machine | None = None,
    environment: dict[str, str] | None = None,
    server_http: str = "",
) -> Setup:
    command = command_line.read(words) if words else None
    assert command or not words
    return Setup(command, environment or {}, Packages([str(place)]), where, server_http=server_http)


def say(setup: Setup, name: str) -> list[Line]:
    return list(next(each for each in checks.catalogue() if each.name == name).look(setup))


def problems(setup: Setup, name: str) -> list[Line]:
    return [line for line in say(setup, name) if line.status == checks.PROBLEM]
