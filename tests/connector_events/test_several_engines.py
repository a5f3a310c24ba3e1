"""Threads, forks, several engines in one process: each has its own record. Spawned processes: tests/engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import RELEASES, Once
from tests.connector_events.several_engines import play_all


@pytest.fixture(scope="module")
def played(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(once(play_all, RELEASES / "0.5.6", str(tmp_path_factory.mktemp("several_engines"))))


def test_two_engines_of_one_process(played: dict[str, Any]) -> None:
    assert min(played["alone"]) > 20
    assert played["in turn"]
    assert played["threads"]


def test_a_fork_has_its_own_record(played: dict[str, Any]) -> None:
    """The child starts with an empty record. The parent's engine continues."""
    assert played["forked"].pop("began with") == 0
    assert all(played["forked"].values()), played["forked"]


def test_no_engine_has_a_finding(played: dict[str, Any]) -> None:
    assert [line for line in played["logged"] if " acted: " not in line] == []
