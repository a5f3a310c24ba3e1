"""The backend `engine`: what it makes of an engine's answers. The engines themselves are those of tests/engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfix_tools.roundtrip.backends import engine
from kvfix_tools.roundtrip.engine_child import ASKED, BLOCK, BLOCKS, GENERATE, OTHERS

PLAIN: dict[str, Any] = {
    name: {"tokens": [[1, 2], [3, 4]], "hits": 0, "asked": 600} for name in ("cold", "others", "warm")
}


@pytest.fixture
def ran() -> dict[str, Any]:
    """An engine whose last round had its hits, and the same outputs."""
    answer = copy.deepcopy(PLAIN)
    answer["warm"]["hits"] = 576
    return answer


def test_equal_outputs_with_hits(ran: dict[str, Any]) -> None:
    assert engine.judge(PLAIN, ran) is None


def test_equal_outputs_without_hits_prove_nothing(ran: dict[str, Any]) -> None:
    ran["warm"]["hits"] = 0
    assert "no token came from the external cache" in str(engine.judge(PLAIN, ran))


def test_a_cache_that_was_not_empty_proves_nothing(ran: dict[str, Any]) -> None:
    ran["cold"]["hits"] = 64
    assert "was not empty" in str(engine.judge(PLAIN, ran))


@pytest.mark.parametrize("name", PLAIN)
def test_other_outputs(ran: dict[str, Any], name: str) -> None:
    ran[name]["tokens"][1] = [3, 5]
    assert engine.judge(PLAIN, ran) == f"{name}: 1 of 2 outputs differ from those without connector"


def test_the_others_write_over_nearly_all_blocks() -> None:
    """So what the last round reads and does not compute was loaded: of what the first held little is left."""
    usable = BLOCKS - 1
    assert sum(-(-(len(prompt) + GENERATE) // BLOCK) for prompt in OTHERS) <= usable  # all at once
    written = sum((len(prompt) + GENERATE - 1) // BLOCK for prompt in OTHERS)  # whole blocks
    held = sum(-(-(len(prompt) + GENERATE) // BLOCK) for prompt in ASKED)
    assert usable - written < held / 4


def test_in_process_needs_a_gpu() -> None:
    assert "no in-process connector for the CPU" in str(engine.missing_v1(torch.device("cpu")))


def test_an_engine_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the engine ended with 1"):
        engine.run_engine(tmp_path, None, "cpu")
