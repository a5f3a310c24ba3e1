import json
import re
from pathlib import Path

import pytest

from kvfix_tools.doctor import checks, command, command_line
from kvfix_tools.doctor.checks import Line
from tests.conftest import ROOT
from tests.doctor.sites import V1, look, serve, site

GOOD, BAD = Line("installed", "ok", "a", ""), Line("memory", "problem", "b", "c")
UNCHECKED, OTHER = Line("extensions", "unchecked", "d", "e"), Line("memory", "ok", "f", "")


@pytest.mark.parametrize(
    ("lines", "code"),
    [([GOOD, UNCHECKED], 0), ([GOOD, UNCHECKED, BAD], 1), ([UNCHECKED, BAD], 1), ([UNCHECKED, OTHER], 77), ([], 77)],
)
def test_exit_codes(lines: list[Line], code: int) -> None:
    """Exit code 77 means that doctor found no problem, but ran no essential check. `memory` is not essential."""
    assert command.exit_code(lines) == code


def test_problems_come_first_and_the_summary_last() -> None:
    text = command.text([GOOD, UNCHECKED, BAD])
    assert [line.split()[0] for line in text.splitlines()] == ["PROBLEM", "do:", "not", "do:", "ok", "SUMMARY:"]
    assert text.endswith("SUMMARY: kvfix doctor: 1 problem, 1 ok, 1 not checked\n")


@pytest.mark.parametrize(
    "words", [["ls"], ["python", "-m", "http.server"], ["vllm"], ["lmcache", "--help"], ["vllm serve 'm"]]
)
def test_a_command_that_is_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.doctor(words, json=False) == 2
    assert "kvfix doctor: the command " in capsys.readouterr().err


def test_the_json_is_stable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "lines", lambda setup: iter([BAD]))
    assert command.doctor([], json=True) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"check": "memory", "status": "problem", "what": "b", "do": "c"}


def test_no_secret_is_printed(tmp_path: Path) -> None:
    """lmcache.yaml, the environment, the command and URLs contain a secret. The report must hide the secret."""
    secret = "hunter2hunter2"
    (tmp_path / "lmcache.yaml").write_text(
        f"remote_url: redis://:{secret}@no-such-host.invalid:1\nchunk_size: 'api_key={secret}'\n"
        f"redis_passwrd: {secret}\nredis_password: {secret}\n"
    )
    environment = {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"), "LMCACHE_RESP_PASSWORD": secret,
                   "LMCACHE_REMOTE_URL": f"redis://user:{secret}@localhost:1", "HF_TOKEN": secret}  # fmt: skip
    extra = {"lmcache.api_key": secret, "lmcache.remote_url": f"lm://{secret}@localhost:1"}
    words = serve(V1, "--api-key", secret, "--block-size", "48", extra=extra)
    lines = list(checks.lines(look(words, site(tmp_path / "site", vllm=False), environment=environment)))
    assert sum(line.status == checks.PROBLEM for line in lines) > 4
    assert secret not in command.text(lines)
    assert "<hidden>" in command.text(lines)


def test_a_check_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(setup: object) -> None:
        raise ZeroDivisionError("planted")

    first, *others = checks.catalogue()
    monkeypatch.setattr(checks, "catalogue", lambda: (first._replace(look=broken), *others))
    failed, *rest = checks.lines(look([], tmp_path))
    says = "this check failed: ZeroDivisionError: planted"
    assert failed == Line(first.name, "unchecked", says, "report this error to kvfix")
    assert rest


def test_on_a_machine_without_anything(tmp_path: Path) -> None:
    lines = list(checks.lines(look([], tmp_path)))
    assert command.exit_code(lines) == 77
    assert all("kvfix doctor where the engine runs" in line.do for line in lines if line.check == "installed")


def test_every_check_says_what_it_looks_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.doctor([], json=False, names=True) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [each.name for each in checks.catalogue()]
    assert len(set(names)) == len(names) == len(listed)
    assert all(re.fullmatch(r"[a-z0-9-]+: \S.*\.", line) for line in listed)


def test_the_page_tells_the_exit_codes() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    assert all(f"| {code} |" in page for code in (0, 1, 2, 77))


TRANSFER = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "org/model", "--kv-transfer-config", TRANSFER, "--tensor-parallel-size", "2"],
        ["vllm", "serve", "--enable-prefix-caching", "org/model", f"--kv_transfer_config={TRANSFER}", "-tp=2"],
        ["A=1", "/opt/bin/vllm", "serve", "--model", "org/model", "-tp", "2", "--kv-transfer-config", TRANSFER],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=org/model", "--kv-transfer-config", TRANSFER,
         "--tensor-parallel-size=2"],
        ["kvfix", "run", "--mode", "check", "--", "vllm", "serve", "org/model", "-tp", "2", "--kv-transfer-config",
         TRANSFER],
        ["docker", "run", "--gpus", "all", "-p", "8000:8000", "vllm/vllm-openai:v0.32.0", "--model", "org/model",
         "--kv-transfer-config", TRANSFER, "--tensor-parallel-size", "2"],
        [f"vllm serve org/model --tensor-parallel-size 2 --kv-transfer-config '{TRANSFER}'"],
        ["vllm", "serve", "org/model", "--kv-transfer-config.kv_connector", "LMCacheConnectorV1",
         "--kv-transfer-config.kv_role=kv_both", "-tp", "2"],
    ],
)  # fmt: skip
def test_one_engine_in_many_forms(words: list[str]) -> None:
    command = command_line.read(words)
    assert (command.program, command.model) == ("vllm serve", "org/model")
    assert command.number("tensor-parallel-size", 1) == 2
    assert command.json("kv-transfer-config") == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def test_the_environment_in_front_counts() -> None:
    command = command_line.read(["env LMCACHE_CHUNK_SIZE=128 PYTHONHASHSEED=0 vllm serve m --port 8001"])
    assert (command.environment, command.container) == ({"LMCACHE_CHUNK_SIZE": "128", "PYTHONHASHSEED": "0"}, False)
    docker = command_line.read(["docker run -e A=1 --env B=2 -v x=y:/z -eC=3 vllm/vllm-openai:latest --model m"])
    assert (docker.environment, docker.container) == ({"A": "1", "B": "2", "C": "3"}, True)


def test_an_lmcache_server_and_keys_with_dots() -> None:
    command = command_line.read(["lmcache", "server", "--port", "5600", "--no-l1-use-lazy", "--l1-size-gb=0.5"])
    assert (command.program, command.model, command.serves) == ("lmcache server", "", False)
    assert command.options == {"port": "5600", "no-l1-use-lazy": "", "l1-size-gb": "0.5"}
    words = ["vllm", "serve", "m", "--kv-transfer-config.kv_connector_extra_config.lmcache.chunk_size", "64"]
    command = command_line.read(words)
    assert command.json("kv-transfer-config") == {"kv_connector_extra_config": {"lmcache.chunk_size": 64}}
