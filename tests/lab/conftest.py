"""What the lab's tests ask of one LMCache release is asked once, in a fork of the zygote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Zygote

#: A fork has none of the threads that its parent has started.
BEFORE = f"""
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(ROOT)!r})
from kvfix_tools.lab import runner
runner.prepare(None)
"""


class Once:
    """`result` of the code; if it failed, every test that asks says why and none runs it again."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._answers: dict[tuple[str, Path], tuple[Any, str]] = {}

    def __call__(self, code: str, lmcache: Path) -> Any:
        if (code, lmcache) not in self._answers:
            try:
                self._answers[code, lmcache] = self._zygote(BEFORE + code, lmcache), ""
            except AssertionError as error:
                self._answers[code, lmcache] = None, str(error)[-4000:]
        result, error = self._answers[code, lmcache]
        assert not error, error
        return result


@pytest.fixture(scope="session")
def once(zygote: Zygote) -> Once:
    return Once(zygote)
