from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.vllm_server import CHUNK, IN_PROCESS, Server
from tests.verify.trials import verify

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
REQUESTS = ("--requests", "24", "--prompt-tokens", "500", "--seconds", "800")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("verify") / "fixed", IN_PROCESS, "fix").running() as server:
        yield server


def test_lmcache_as_released(tmp_path: Path) -> None:
    """LMCache issue 4463: every hit is wrong from vLLM 0.26 on (KVF020)."""
    with Server(tmp_path / "released", IN_PROCESS, "off").running() as server:
        code, text = verify(server.url, *REQUESTS)
    assert code == 1, text
    assert "SUMMARY: kvfix verify different: wrong for all hits, alone and under load" in text
    assert "kvfix explain KVF020" in text


def test_with_kvfix(fixed: Server) -> None:
    code, text = verify(fixed.url, *REQUESTS)
    assert code == 0, text
    assert f"chunks of {CHUNK}" in text


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("only_one_chunk", "wrong where exactly 1 chunks come from the connector, alone and under load"),
        ("only_together", "only under load"),
    ],
)
def test_a_planted_fault_is_found(fixed: Server, fault: str, found: str) -> None:
    fixed.plant(fault)
    code, text = verify(fixed.url, *REQUESTS)
    fixed.plant("")
    assert code == 1, text
    assert found in text, text
