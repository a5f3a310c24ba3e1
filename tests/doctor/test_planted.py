"""Only its check finds a fault planted in a set-up (planted.toml), and gives the expected remedy."""

import socket
import sys
from pathlib import Path

import pytest
import tomllib

from kvfix_tools.doctor import servers
from kvfix_tools.doctor.command_line import Command
from tests.doctor.sites import MP, V1, Planted, look, problems, say, serve, site, torch

ROWS = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
PLANTED = {name: Planted(**row) for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the newest LMCache and the installed vLLM."""
    return site(tmp_path_factory.mktemp("newest"))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", tuple(PLANTED[name].python) or sys.version_info)
    with PLANTED[name].served() as planted:
        lines = say(planted.setup(tmp_path, newest), planted.check)
    found = [line for line in lines if line.status == planted.status]
    assert any(planted.what in line.what and planted.do in line.do for line in found) == bool(planted.what), lines
    assert planted.status != "none" or lines == []
    assert not any(planted.do_without and planted.do_without in line.do for line in found)


@pytest.mark.parametrize("check", sorted({each.check for each in PLANTED.values()}))
def test_without_a_fault_there_is_none(check: str, newest: Path) -> None:
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOCAL_CPU": "True"}
    extra = {"lmcache.chunk_size": 64, "lmcache.max_local_cpu_size": 0.2, "use_layerwise": True}
    assert problems(look(serve(V1, "-tp", "2", extra=extra), newest, environment=environment), check) == []


@pytest.mark.parametrize(("cuda", "supported", "count"), [(None, "", 1), (None, "auto", 0), ("13.0", "", 0)])
def test_a_worker_without_a_gpu(
    cuda: str | None, supported: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of LMCache 0.5.6 accepts only the mode lmcache_driven, unless its command line names another mode."""
    options = {"port": "5555", **({"supported-transfer-mode": supported} if supported else {})}
    monkeypatch.setattr(servers, "running", lambda port: Command("lmcache server", "", options, {}, False, ""))
    here = torch(site(tmp_path, vllm=False), cuda=cuda)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = serve(MP, extra={"lmcache.mp.host": "localhost", "lmcache.mp.port": server.getsockname()[1]})
        assert len(problems(look(words, here), "transfer-mode")) == count


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("tcp://localhost:5555", "localhost", 5555), ("grpc://10.0.0.1:1", "10.0.0.1", 1), ("host:2", "host", 2),
        ("tcp://[::1]:3", "::1", 3), ("redis://user:pass@h:4/0", "h", 4), ("tcp://localhost", "localhost", None),
    ],
)  # fmt: skip
def test_addresses(url: str, host: str, port: int | None) -> None:
    assert servers.address(url) == (url, host, port)
