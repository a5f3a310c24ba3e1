"""The command line is read as vLLM and a shell would, and leniently."""

import pytest

from kvfix_tools.doctor import command_line

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
    assert command is not None
    assert (command.program, command.model) == ("vllm serve", "org/model")
    assert command.number("tensor-parallel-size", 1) == 2
    assert command.json("kv-transfer-config") == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def test_the_environment_in_front_counts() -> None:
    words = "env LMCACHE_CHUNK_SIZE=128 PYTHONHASHSEED=0 vllm serve m --port 8001"
    command = command_line.read([words])
    assert command is not None
    assert command.environment == {"LMCACHE_CHUNK_SIZE": "128", "PYTHONHASHSEED": "0"}
    words = "docker run -e A=1 --env B=2 -v x=y:/z -eC=3 vllm/vllm-openai:latest --model m"
    docker = command_line.read([words])
    assert docker is not None
    assert docker.environment == {"A": "1", "B": "2", "C": "3"}
    assert docker.container
    assert not command.container


def test_an_lmcache_server() -> None:
    command = command_line.read(["lmcache", "server", "--port", "5600", "--no-l1-use-lazy", "--l1-size-gb=0.5"])
    assert command is not None
    assert (command.program, command.model, command.serves) == ("lmcache server", "", False)
    assert command.options == {"port": "5600", "no-l1-use-lazy": "", "l1-size-gb": "0.5"}


def test_keys_of_a_connector_have_dots() -> None:
    words = ["vllm", "serve", "m", "--kv-transfer-config.kv_connector_extra_config.lmcache.chunk_size", "64"]
    command = command_line.read(words)
    assert command is not None
    assert command.json("kv-transfer-config") == {"kv_connector_extra_config": {"lmcache.chunk_size": 64}}


@pytest.mark.parametrize("words", [["ls"], ["python", "-m", "http.server"], ["vllm"], ["lmcache", "--help"], []])
def test_other_programs_are_none(words: list[str]) -> None:
    assert command_line.read(words) is None
