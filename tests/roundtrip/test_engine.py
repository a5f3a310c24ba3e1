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
from tests.fork_server import FORK_WORKERS, Forked
from tests.roundtrip.test_command import output_of

TOKENS = {"cold": [[1, 2], [3, 4]], "changed": [[1, 3], [4, 4]], "others": [[5, 5]], "warm": [[1, 2], [3, 4]]}
COUNTS = {"hits": 0, "loaded": 0, "failed": 0, "asked": 600}  # three prompts of 200 tokens
PLAIN: dict[str, Any] = {name: {"tokens": tokens, **COUNTS} for name, tokens in TOKENS.items()}
GRANTED = SimpleNamespace(can_load=True, lmcache_cached_tokens=192, vllm_cached_tokens=32)
REMOTE = SimpleNamespace(start=64, end=192, skip_first_n_tokens=8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "None"),
        ({"violations": ["KVR001 wrong"]}, "kvfix reports a violation: KVR001 wrong"),
        # The next 3 faults do not change outputs, because vLLM computes tokens that were not promised or not loaded.
        ({"warm": {"hits": 0}}, "warm: no token came from the external cache"),
        ({"warm": {"loaded": 512}}, "warm: 576 tokens were promised, but only 512 loaded"),
        ({"warm": {"failed": 2}}, "warm: the load of 2 blocks failed"),
        ({"cold": {"hits": 64}}, "cold: 64 tokens came from the external cache, which must be empty in this round"),
        *(
            ({name: {"tokens": [[3, 5], *each["tokens"][1:]]}}, f"{name}: 1 of {len(each['tokens'])} outputs differ")
            for name, each in PLAIN.items()
        ),
        # With vLLM's dummy weights, a model gives one answer to all prompts that end with the same token.
        (
            {"plain": {**PLAIN, "changed": PLAIN["cold"]}},
            "2 outputs do not change if kvfix changes the first prompt tokens",
        ),
    ],
)
def test_judgement(changes: dict[str, Any], text: str) -> None:
    plain = changes.get("plain", PLAIN)
    right = {**plain, "warm": {**plain["warm"], "hits": 576, "loaded": 576}}  # 3 prompts of 3 chunks of 64 tokens
    ran = {name: {**each, **changes.get(name, {})} for name, each in right.items()}
    assert str(engine.judge(plain, {**ran, "violations": changes.get("violations", [])})).startswith(text)


def test_the_others_write_over_nearly_all_blocks() -> None:
    """The prompts OTHERS overwrite most KV of the prompts ASKED. So the engine must load or compute this KV again."""
    usable = BLOCKS - 1
    assert sum(-(-(len(prompt) + GENERATE) // BLOCK) for prompt in OTHERS) <= usable  # all prompts run at the same time
    written = sum((len(prompt) + GENERATE - 1) // BLOCK for prompt in OTHERS)  # counts only whole blocks
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
    with pytest.raises(RuntimeError, match="the engine ended with exit code 1"):
        engine.run_engine(tmp_path, None, "cpu")


def test_the_error_that_came_first_is_reported() -> None:
    log = "WARNING ValueError: none\n(Worker pid=1) KeyError: 'the cause'\nTraceback:\nEngineDeadError: look above"
    assert engine.cause(log) == "KeyError: 'the cause'"
    assert engine.cause("x" * 2000) == "... " + "x" * 1000


@pytest.mark.engine
@pytest.mark.timeout(900)
class TestOnRealEngines:
    def test_as_released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bug of LMCache issue 4463 changes answers. Use LMCache 0.5.5, because 0.5.6 refuses vLLM's CPU layout."""
        monkeypatch.setattr(real_engine, "run", functools.partial(real_engine.run, popen=Forked))
        monkeypatch.setenv(FORK_WORKERS, "")
        monkeypatch.setenv("PYTHONPATH", str(release("0.5.5")) + os.pathsep + os.environ.get("PYTHONPATH", ""))
        answer = output_of("--backend", "engine-v1", "--no-fixes")
        [cell] = answer["cells"]
        assert (answer["exit"], cell["verdict"]) == (1, "failed")
        assert cell["reason"] == "warm: 3 of 3 outputs differ from outputs without a connector"
        assert "of 600 prompt tokens 576 were promised and 576 loaded" in cell["operations"]

    def test_with_kvfix(self) -> None:
        answer = output_of("--backend", "engine-v1")
        [cell] = answer["cells"]
        assert answer["exit"] == 0, cell
        assert "of 600 prompt tokens 576 were promised and 576 loaded" in cell["operations"]
