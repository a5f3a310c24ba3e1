"""The backend `engine`: its judgement of an engine's answers. The engines themselves are those of tests/engine."""

import copy
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.backends import engine
from kvfix_tools.roundtrip.backends.engine import ASKED, BLOCK, BLOCKS, GENERATE, OTHERS
from tests.conftest import release
from tests.fork_server import FORK_WORKERS
from tests.forked import Forked
from tests.roundtrip.output import output_of

PLAIN: dict[str, Any] = {
    name: {"tokens": tokens, "hits": 0, "loads": {"loaded": 0, "failed": 0}, "asked": 600}
    for name, tokens in {
        "cold": [[1, 2], [3, 4]],
        "changed": [[1, 3], [4, 4]],
        "others": [[5, 5]],
        "warm": [[1, 2], [3, 4]],
    }.items()
}
GRANTED = SimpleNamespace(can_load=True, lmcache_cached_tokens=192, vllm_cached_tokens=32)
REMOTE = SimpleNamespace(start=64, end=192, skip_first_n_tokens=8)


@pytest.fixture
def ran() -> dict[str, Any]:
    """An engine whose last round had its hits, and the same outputs."""
    answer = copy.deepcopy(PLAIN)
    answer["warm"].update(hits=576, loads={"loaded": 576, "failed": 0})
    return {**answer, "violations": []}


def test_equal_outputs_with_hits(ran: dict[str, Any]) -> None:
    assert engine.judge(PLAIN, ran) is None
    assert engine.judge(PLAIN, {**ran, "violations": ["KVR001 wrong"]}) == "kvfix reports a violation: KVR001 wrong"


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("warm", {"hits": 0}, "no token came from the external cache"),
        ("warm", {"loads": {"loaded": 512, "failed": 0}}, "576 tokens were promised, but only 512 loaded"),
        ("warm", {"loads": {"loaded": 576, "failed": 2}}, "the load of 2 blocks failed"),
        ("cold", {"hits": 64}, "was not empty"),
    ],
)
def test_equal_outputs_prove_nothing(ran: dict[str, Any], name: str, change: dict[str, Any], text: str) -> None:
    """vLLM computes what was not promised, and what a load has not brought."""
    ran[name].update(change)
    assert text in str(engine.judge(PLAIN, ran))


@pytest.mark.parametrize("name", PLAIN)
def test_other_outputs(ran: dict[str, Any], name: str) -> None:
    ran[name]["tokens"][0] = [3, 5]
    many = len(PLAIN[name]["tokens"])
    assert engine.judge(PLAIN, ran) == f"{name}: 1 of {many} outputs differ from outputs without a connector"


def test_a_model_that_does_not_look_at_what_is_loaded_proves_nothing(ran: dict[str, Any]) -> None:
    """A model with vLLM's dummy weights gives the same answers to all prompts with the same last token."""
    plain = copy.deepcopy(PLAIN)
    plain["changed"]["tokens"][1] = plain["cold"]["tokens"][1]
    ran["changed"] = plain["changed"]
    assert str(engine.judge(plain, ran)).startswith("1 outputs do not change with the first tokens")


def test_the_others_write_over_nearly_all_blocks() -> None:
    """So what the last round reads and does not compute was loaded: of what the first held little is left."""
    usable = BLOCKS - 1
    assert sum(-(-(len(prompt) + GENERATE) // BLOCK) for prompt in OTHERS) <= usable  # all at once
    written = sum((len(prompt) + GENERATE - 1) // BLOCK for prompt in OTHERS)  # whole blocks
    held = sum(-(-(len(prompt) + GENERATE) // BLOCK) for prompt in ASKED)
    assert usable - written < held / 4


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (SimpleNamespace(load_spec=None), 0),
        (SimpleNamespace(load_spec=SimpleNamespace(can_load=False)), 0),
        (SimpleNamespace(load_spec=GRANTED), 160),
        (SimpleNamespace(direction="STORE", op=REMOTE), 0),
        (SimpleNamespace(direction="RETRIEVE", op=REMOTE), 120),
    ],
    ids=["nothing", "not granted", "in process", "a store", "multi-process"],
)
def test_what_is_loaded_is_written_down(request_: Any, tokens: int, tmp_path: Path) -> None:
    assert engine.loads(tmp_path / "none") == {"loaded": 0, "failed": 0}
    (tmp_path / "some").write_text("loaded=192\nfailed=2\nloaded=8\n")
    assert engine.loads(tmp_path / "some") == {"loaded": 200, "failed": 2}
    assert engine.tokens_to_load(request_) == tokens


def test_an_engine_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the engine ended with 1"):
        engine.run_engine(tmp_path, None, "cpu")


def test_the_error_that_came_first_is_reported() -> None:
    log = (
        "WARNING ValueError: none of it\n(Worker pid=1) KeyError: 'the cause'\nTraceback:\nEngineDeadError: look above"
    )
    assert engine.cause(log) == "KeyError: 'the cause'"
    assert engine.cause("x" * 2000) == "... " + "x" * 1000


@pytest.mark.engine
@pytest.mark.timeout(900)
class TestOnRealEngines:
    """LMCache's own connector V2 moves the KV of vLLM's attention. (Multi-process: tests/engine, the same set-up.)"""

    def run(self, *more: str) -> tuple[int, dict[str, Any]]:
        answer = output_of("--backend", "engine-v1", *more)
        [cell] = answer["cells"]
        return answer["exit"], cell

    def test_as_released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """LMCache issue 4463: everything is promised and loaded, nothing is logged, and the answers differ. (0.5.6 is
        the first whose torch operations refuse the layout that vLLM for the CPU has.)"""
        monkeypatch.setattr(real_engine, "run", functools.partial(real_engine.run, popen=Forked))
        monkeypatch.setenv(FORK_WORKERS, "")
        monkeypatch.setenv("PYTHONPATH", str(release("0.5.5")) + os.pathsep + os.environ.get("PYTHONPATH", ""))
        code, cell = self.run("--no-fixes")
        assert (code, cell["verdict"]) == (1, "failed")
        assert cell["reason"] == "warm: 3 of 3 outputs differ from outputs without a connector"
        assert "of 600 prompt tokens 576 were promised and 576 loaded" in cell["operations"]

    def test_with_kvfix(self) -> None:
        code, cell = self.run()
        assert code == 0, cell
        assert "of 600 prompt tokens 576 were promised and 576 loaded" in cell["operations"]
