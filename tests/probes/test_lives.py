"""Threads, forks, spawned processes, several engines in one process: each has a record of its own, and it is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RELEASES, Fresh


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, and its children."""
    script = Path(__file__).with_name("lives.py")
    folder = tmp_path_factory.mktemp("lives")
    done = Fresh().run([sys.executable, str(script), str(RELEASES / "0.5.6"), str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_two_engines_of_one_process(lives: dict[str, Any]) -> None:
    assert min(lives["alone"]) > 20
    assert lives["in turn"]
    assert lives["threads"]


def test_a_fork_has_a_record_of_its_own(lives: dict[str, Any]) -> None:
    """What the parent saw is the parent's, whose engine goes on."""
    assert lives["forked"].pop("began with") == 0
    assert all(lives["forked"].values()), lives["forked"]


def test_a_spawned_child_is_watched_by_itself(lives: dict[str, Any]) -> None:
    spawned = lives["spawned"]
    assert spawned["not mine"]
    assert spawned["ready"]
    assert (spawned["mode"], spawned["events"]) == ("check", lives["alone"][0])


def test_nothing_is_wrong_in_any(lives: dict[str, Any]) -> None:
    assert lives["said"] == []
