"""The LMCache server of the multi-process connector, as its command line tells its mode; and addresses of servers."""

import socket
from pathlib import Path

import pytest

from kvfix_tools.doctor import servers
from kvfix_tools.doctor.command_line import Command
from tests.doctor.sites import MP, look, problems, serve, site


@pytest.mark.parametrize(("cuda", "supported", "count"), [("None", "", 1), ("None", "auto", 0), ("'13.0'", "", 0)])
def test_a_worker_without_a_gpu(
    cuda: str, supported: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of LMCache 0.5.6 takes lmcache_driven only, unless its command line has another mode."""
    options = {"supported-transfer-mode": supported} if supported else {}
    monkeypatch.setattr(servers, "running", lambda port: Command("lmcache server", "", options, {}, False, ""))
    here = site(tmp_path, vllm=False)
    (here / "torch").mkdir()
    (here / "torch/version.py").write_text(f"cuda = {cuda}\nhip = None\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = serve(MP, extra={"lmcache.mp.host": "localhost", "lmcache.mp.port": server.getsockname()[1]})
        assert len(problems(look(words, here), "transfer-mode")) == count


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
