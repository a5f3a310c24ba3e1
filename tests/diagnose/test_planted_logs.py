"""Whole logs of real engines in which a fault was planted, and of their healthy twins (tests/engine/planted_cases.py).

logs/planted.tar.xz is what `python -m tests.engine.planted_logs FOLDER --pack` has made of a run.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.engine import healthy_logs
from tests.engine.planted_cases import CASES
from tests.engine.planted_logs import Case

ARCHIVE = Path(__file__).parent / "logs/planted.tar.xz"


def _packed() -> set[str]:
    with tarfile.open(ARCHIVE) as packed:
        return {name.partition("/")[0] for name in packed.getnames()}


PACKED = _packed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("planted")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(to, filter="data")
    return to


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PACKED], ids=lambda case: case.name)
def test_the_first_finding_is_the_planted_fault(case: Case, folder: Path) -> None:
    found = healthy_logs.found(*sorted((folder / case.name).iterdir()))
    first = next((each.rule.code for each in found.findings if not each.is_note), "")
    assert first == case.code


def test_every_planted_fault_has_a_healthy_twin() -> None:
    names = {case.name: case for case in CASES}
    planted = [case for case in CASES if case.truth]
    assert [case.name for case in planted if names[case.twin].truth] == []
    assert {case.twin for case in planted if case.name in PACKED} <= PACKED
    assert sum(case.name in PACKED and bool(case.code) for case in planted) >= 30
