"""kvfix doctor has no complaint about set-ups that work (tests/engine starts engines with them)."""

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.doctor import checks, extensions
from kvfix_tools.roundtrip import real_engine
from tests.conftest import Fresh
from tests.doctor.sites import MP, look, site, torch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch(site(tmp_path_factory.mktemp("site")))


def words(folder: Path, transfer: dict[str, Any] | None) -> list[str]:
    """Return the command `vllm serve` with the settings of `real_engine.make`."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({**real_engine.MODEL, "torch_dtype": "float32"}))
    options = ["--dtype", "float32", "--enforce-eager", "--block-size", str(real_engine.BLOCK), "--port", "0"]
    given = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
    return ["vllm", "serve", str(folder / "model"), *options, *given]


@pytest.mark.parametrize("which", ["in process", "multi process", "plain"])
def test_a_set_up_that_works_has_no_complaint(
    which: str, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks except that of compiled extensions, which needs torch: test_the_installation_itself has it."""
    facts = {"version": "2.13.0", "cuda": None, "available": False}
    monkeypatch.setattr(extensions, "attempt", lambda *_: extensions.Tried(facts, {}, "not in this test"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": server.getsockname()[1]}
        transfer = {
            "in process": real_engine.in_process(64),
            "multi process": {**MP, "kv_connector_extra_config": extra},
            "plain": None,
        }
        setup = look(words(tmp_path, transfer[which]), place, environment=real_engine.ENVIRONMENT)
        lines = list(checks.lines(setup))
    assert [line for line in lines if line.status == checks.PROBLEM] == []
    assert "this check failed" not in "".join(line.what for line in lines)
    right = {line.check for line in lines if line.status == checks.OK}
    assert right >= {"installed", "torch", "releases", "memory"}
    assert which == "plain" or right >= {"kv-transfer-config", "connector-keys", "hybrid-model", "parallel"}


def test_the_installation_itself(tmp_path: Path, fresh: Fresh) -> None:
    """Run the whole command. Its child process imports torch, and tries the extensions."""
    command = [sys.executable, "-m", "kvfix_tools.cli", "doctor", "--json", "--"]
    done = fresh.run([*command, *words(tmp_path, real_engine.in_process(64))], **real_engine.ENVIRONMENT)
    lines = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {line["status"] for line in lines if line["check"] == "extensions"} <= {"ok", "unchecked"}
    assert any(re.match(r"vllm\._C(_AVX\w+)? loads with torch", line["what"]) for line in lines)
    fixes = next(line for line in lines if line["check"] == "fixes")
    assert "KVFIX=fix" in fixes["do"]
