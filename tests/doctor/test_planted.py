import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

from kvfix_tools.doctor import checks, extensions, servers
from kvfix_tools.doctor.command_line import Command
from kvfix_tools.roundtrip import real_engine
from tests.conftest import Fresh
from tests.doctor.sites import MP, Planted, look, problems, say, serve, site, torch

ROWS = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
PLANTED = {name: Planted(**row) for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def words(folder: Path, transfer: dict[str, Any] | None) -> list[str]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps({**real_engine.MODEL, "torch_dtype": "float32"}))
    options = ["--dtype", "float32", "--enforce-eager", "--block-size", str(real_engine.BLOCK), "--port", "0"]
    given = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
    return ["vllm", "serve", str(folder / "model"), *options, *given]


@pytest.mark.parametrize("which", ["in process", "two ranks", "multi process", "plain"])
def test_a_set_up_that_works_has_no_complaint(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all checks, without loading the compiled extensions. `test_the_installation_itself` loads the extensions."""
    facts = {"version": "2.13.0", "cuda": None, "available": False}
    monkeypatch.setattr(extensions, "attempt", lambda *_: extensions.Tried(facts, {}, "not in this test"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": server.getsockname()[1]}
        command = {
            "in process": words(tmp_path, real_engine.in_process(64)),
            "two ranks": [*words(tmp_path, real_engine.in_process(64, use_layerwise=True)), "-tp", "2"],
            "multi process": words(tmp_path, {**MP, "kv_connector_extra_config": extra}),
            "plain": words(tmp_path, None),
        }
        place = torch(site(tmp_path / "site"))
        lines = list(checks.lines(look(command[which], place, environment=real_engine.ENVIRONMENT)))
    assert [line for line in lines if line.status == checks.PROBLEM] == []
    assert "this check failed" not in "".join(line.what for line in lines)
    right = {line.check for line in lines if line.status == checks.OK}
    assert right >= {"installed", "torch", "releases", "memory"}
    assert which == "plain" or right >= {"kv-transfer-config", "connector-keys", "hybrid-model", "parallel"}


@pytest.mark.parametrize(("cuda", "supported", "count"), [(None, "", 1), (None, "auto", 0), ("13.0", "", 0)])
def test_without_a_gpu(cuda: Any, supported: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, LMCache 0.5.6's server has only mode lmcache_driven. A worker without a GPU needs engine_driven."""
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


def test_the_installation_itself(tmp_path: Path, fresh: Fresh) -> None:
    command = [sys.executable, "-m", "kvfix_tools.cli", "doctor", "--json", "--"]
    done = fresh.run([*command, *words(tmp_path, real_engine.in_process(64))], **real_engine.ENVIRONMENT)
    lines = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {line["status"] for line in lines if line["check"] == "extensions"} <= {"ok", "unchecked"}
    assert any(re.match(r"vllm\._C(_AVX\w+)? loads with torch", line["what"]) for line in lines)
    assert "KVFIX=fix" in next(line for line in lines if line["check"] == "fixes")["do"]
