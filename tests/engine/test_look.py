"""`kvfix look` at a real engine under load that was started without kvfix: read from inside, and nothing is wrong."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvfix.ledger import owed
from kvfix.ledger.standstill import Look, verdicts
from kvfix_tools.look import command, looking
from tests.engine.start import CROWD, TWO_PROCESSES, run, server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LOOKS, ROUNDS = 12, 8


def test_a_healthy_engine(tmp_path: Path) -> None:
    looks: list[Look] = []
    decided: list[Look] = []

    def do(pid: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until and not (looks and _busy(looks[-1])):
            time.sleep(0.5)
            looker = looking.Looker(looking.engine_of(pid), full=False)
            looks[:] = [looker.look()]
        looks.extend(looker.look() for _ in range(LOOKS))
        decided.extend(command.enough(looker))

    with server() as transfer:
        ran = run(
            tmp_path, False, transfer, rounds=[CROWD] * ROUNDS, engine=TWO_PROCESSES, forked=False,
            when=("Initializing a V1 LLM engine", do),
        )  # fmt: skip
    assert ran.answer is not None, ran.log[-4000:]
    assert all(each == ran.answer["rounds"][0] for each in ran.answer["rounds"])
    inside = [each for each in looks if owed.engines(each.processes)]
    assert len(inside) > LOOKS // 2
    assert sum(map(_busy, inside)) > 2
    (engine,) = owed.engines(inside[-1].processes)
    assert engine.sees_transfers
    assert [each["class"] for each in engine.connectors] == ["LMCacheMPConnector"]
    for first, second in pairwise(inside):
        assert verdicts([first, second]) == []
    assert verdicts(decided) == []


def _busy(look: Look) -> bool:
    return any(engine.requests for engine in owed.engines(look.processes))
