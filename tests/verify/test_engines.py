"""`kvfix verify` against real vLLM servers on the CPU, with LMCache in process.

LMCache uses its own GPU connector on CPU tensors. There are two servers. tests/verify/trials.py has more connectors,
all planted faults, prefill and decode instances, and other clients.
"""

from collections.abc import Iterator

import pytest

from tests.verify import served
from tests.verify.served import Served

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
REQUESTS = ("--requests", "24", "--prompt-tokens", "500", "--seconds", "800")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With kvfix's fixes in it."""
    folder = tmp_path_factory.mktemp("verify") / "fixed"
    with Served(folder, "fix", served.IN_PROCESS).running() as server:
        yield server


def test_lmcache_as_released(tmp_path_factory: pytest.TempPathFactory) -> None:
    """LMCache issue 4463: every hit is wrong from vLLM 0.26 on (KVF020)."""
    folder = tmp_path_factory.mktemp("verify") / "released"
    with Served(folder, "off", served.IN_PROCESS).running() as server:
        code, text = served.verify(server.url, *REQUESTS)
    assert code == 1, text
    assert "SUMMARY: kvfix verify different: wrong for all hits, alone and under load" in text
    assert "kvfix explain KVF020" in text


def test_with_kvfix(fixed: Served) -> None:
    code, text = served.verify(fixed.url, *REQUESTS)
    assert code == 0, text
    assert f"chunks of {served.CHUNK}" in text


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("only_one_chunk", "wrong where exactly 1 chunks come from the connector, alone and under load"),
        ("only_together", "only under load"),
    ],
)
def test_a_planted_fault_is_found(fixed: Served, fault: str, found: str) -> None:
    fixed.plant(fault)
    code, text = served.verify(fixed.url, *REQUESTS)
    fixed.plant("")
    assert code == 1, text
    assert found in text, text
