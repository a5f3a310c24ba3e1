"""A sound instrument: every oracle sees the fault that is planted for it, and a sound release has none to see."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

from tests.conftest import RELEASES, ROOT, Fresh, clean_environment
from tests.lab.faults_v1 import FAULTS

#: A bug of the release that even the pleasant schedules show (scenario priority-left-after-resume).
KNOWN = "_requests_priority still holds it"


@cache
def outcomes() -> dict[str, Any]:
    path = os.pathsep.join([clean_environment()["PYTHONPATH"], str(ROOT)])
    code = f"from tests.lab.faults_v1 import outcomes; result = outcomes({str(RELEASES / '0.5.6')!r})"
    return dict(Fresh()(code, PYTHONPATH=path))


def test_nothing_planted_nothing_found() -> None:
    for run in outcomes()["sound"]:
        assert [message for _, message in run["found"] if message != KNOWN] == []
        assert run["counts"]["loaded_tokens"] > 256
        assert run["counts"]["preemptions"] == 1
        assert run["counts"]["stored_tokens"] > 256


@pytest.mark.parametrize("name", FAULTS)
def test_planted(name: str) -> None:
    rule, text, _ = FAULTS[name]
    found = outcomes()["faults"][name]["found"]
    assert any(code == rule and text in message for code, message in found), found


def test_pleasant_random_schedules_are_clean() -> None:
    for run in outcomes()["random"]:
        assert {message: seed for message, seed in run["found"].items() if KNOWN not in message} == {}
        assert min(run["counts"][each] for each in ("loaded_tokens", "stored_tokens", "preemptions")) > 0


def test_the_same_schedule_gives_the_same_run() -> None:
    once, again = outcomes()["twice"]
    assert once == again
    assert once["found"]
