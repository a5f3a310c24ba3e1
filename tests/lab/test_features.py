"""Each feature of docs/lab-features.md is counted when it is drawn, and its planted fault is found."""

from __future__ import annotations

import re

import pytest

from kvfix_tools.lab.engine.counts import COUNTED, FEATURES
from kvfix_tools.lab.scenario import find
from tests.conftest import ROOT
from tests.lab import planted_in_real_server  # noqa: F401  it registers its faults
from tests.lab.test_planted_faults import FAULTS

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/lab-features.md").read_text().splitlines()
    if line.startswith("| ") and "counted as" not in line
]
PLANTED = {name for _, name in FAULTS}
REAL = {name for setup, name in FAULTS if setup == "mp-real"}


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_its_names_are_those_of_the_code(row: list[str]) -> None:
    _, drawn, counted, faults, scenarios = row
    assert drawn
    assert named(counted)
    assert set(named(counted)) <= set(COUNTED)
    assert set(named(faults)) <= PLANTED
    assert [slug for slug in named(scenarios) if find(slug) is None] == []
    assert named(faults)


def test_every_feature_has_its_place() -> None:
    counted = {name for row in ROWS for name in named(row[2])}
    assert {name for name in FEATURES if not counted & {f"loads_with_{name}", f"stores_with_{name}"}} == set()


def test_each_fault_of_the_real_server_is_in_a_row() -> None:
    assert {name for row in ROWS for name in named(row[3])} >= REAL
