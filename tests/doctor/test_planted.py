"""Faults planted in set-ups (planted.toml): each is found by its check, with the remedy as typed, and only there."""

import sys
from pathlib import Path

import pytest
import tomllib

from tests.doctor.sites import V1, Planted, look, problems, say, serve

ROWS = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
PLANTED = {name: Planted(**row) for name, row in ROWS.items()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", tuple(PLANTED[name].python) or sys.version_info)
    with PLANTED[name].served() as planted:
        lines = say(planted.setup(tmp_path, newest), planted.check)
    found = [line for line in lines if line.status == planted.status]
    assert any(planted.what in line.what and planted.do in line.do for line in found) == bool(planted.what), lines
    assert planted.status != "none" or lines == []
    assert not any(planted.do_without and planted.do_without in line.do for line in found)


@pytest.mark.parametrize("check", sorted({each.check for each in PLANTED.values()}))
def test_without_a_fault_there_is_none(check: str, newest: Path) -> None:
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOCAL_CPU": "True"}
    extra = {"lmcache.chunk_size": 64, "lmcache.max_local_cpu_size": 0.2, "use_layerwise": True}
    assert problems(look(serve(V1, "-tp", "2", extra=extra), newest, environment=environment), check) == []
