"""Threads, forks, spawned processes, several engines in one process: each has its own record, and it is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import quick
from tests.conftest import RELEASES, Fresh


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    quick.skip()  # the child wants torch, and the process waits for its answer
    script = Path(__file__).with_name("several_engines.py")
    folder = tmp_path_factory.mktemp("several_engines")
    done = Fresh().run([sys.executable, str(script), str(RELEASES / "0.5.6"), str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_two_engines_of_one_process(played: dict[str, Any]) -> None:
    assert min(played["alone"]) > 20
    assert played["in turn"]
    assert played["threads"]


def test_a_fork_has_its_own_record(played: dict[str, Any]) -> None:
    """The child starts with an empty record. The parent's engine continues."""
    assert played["forked"].pop("began with") == 0
    assert all(played["forked"].values()), played["forked"]


def test_a_spawned_child_watches_its_own_hooks(played: dict[str, Any]) -> None:
    spawned = played["spawned"]
    assert spawned["not mine"]
    assert spawned["ready"]
    assert (spawned["mode"], spawned["events"]) == ("check", played["alone"][0])


def test_no_engine_has_a_finding(played: dict[str, Any]) -> None:
    assert [line for line in played["logged"] if " acted: " not in line] == []
