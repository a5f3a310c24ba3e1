"""Faults planted in set-ups (planted.toml): each is found by its check, with the remedy as typed, and only there."""

from pathlib import Path

import pytest
import tomllib

from tests.doctor.sites import V1, Planted, look, problems, say, serve, site

ROWS = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
PLANTED = {name: Planted(**row) for name, row in ROWS.items()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, newest: Path) -> None:
    with PLANTED[name].served() as planted:
        lines = say(planted.setup(tmp_path, newest), planted.check)
    found = [line for line in lines if line.status == planted.status]
    assert any(planted.what in line.what and planted.do in line.do for line in found) == bool(planted.what), lines
    assert planted.status != "none" or lines == []


@pytest.mark.parametrize("check", sorted({each.check for each in PLANTED.values()}))
def test_without_a_fault_there_is_none(check: str, newest: Path) -> None:
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOCAL_CPU": "True"}
    extra = {"lmcache.chunk_size": 64, "lmcache.max_local_cpu_size": 0.2, "use_layerwise": True}
    assert problems(look(serve(V1, "-tp", "2", extra=extra), newest, environment=environment), check) == []


@pytest.mark.parametrize(("lmcache", "found"), [("0.3.10", 1), ("0.5.6", 0)])
def test_an_old_release_hashes_none(lmcache: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.3.15, on Python before 3.12, a seed is not enough."""
    monkeypatch.setattr("sys.version_info", (3, 11))
    setup = look(serve(V1, "-tp", "2"), site(tmp_path, lmcache, vllm=False), environment={"PYTHONHASHSEED": "0"})
    assert len(problems(setup, "hash-seed")) == found


@pytest.mark.parametrize(
    ("lmcache", "yaml", "found"),
    [
        ("0.3.12", "local_disk: /tmp/x\nmax_local_disk_size: 5", "cannot write keys of bytes"),
        ("0.3.12", "chunk_size: 256", ""),
        ("0.3.13", "local_disk: /tmp/x\nmax_local_disk_size: 5", ""),
        ("0.4.5", "enable_async_loading: true", "needs hashes that are numbers"),
        ("0.4.6", "enable_async_loading: true", ""),
    ],
)
def test_a_hash_that_is_bytes(
    lmcache: str, yaml: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVD739 and KVD738, before the launch; a seed helps there from Python 3.12 on."""
    planted = Planted("hash-seed", yaml=f"{yaml}\npre_caching_hash_algorithm: sha256_cbor")
    setup = planted.setup(tmp_path, site(tmp_path / "place", lmcache))
    said = problems(setup, "hash-seed")
    assert [line.what for line in said if found and found in line.what] == [line.what for line in said]
    assert bool(said) == bool(found)
    for version_info, seed in (((3, 11), lmcache >= "0.4.1"), ((3, 12), True)):  # KVF901
        monkeypatch.setattr("sys.version_info", version_info)
        assert all(("PYTHONHASHSEED=0" in line.do) == seed for line in problems(setup, "hash-seed"))
