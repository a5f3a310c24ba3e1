"""Memory, shared memory and locked memory: a planted machine for each case."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfix_tools.doctor import machine as doctor_machine
from tests.doctor.sites import V1, look, machine, problems, say, serve


def cpu(size: float, *more: str) -> list[str]:
    return serve(V1, *more, extra={"lmcache.max_local_cpu_size": size})


def test_locked_memory_counts_for_rdma(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = serve({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 * 1024, resource.RLIM_INFINITY))
    where = machine(tmp_path)
    assert "ulimit -l is 0.0625 MiB: nixl" in problems(look(nixl, place, where), "locked-memory")[0].what
    assert problems(look(cpu(1), place, where), "locked-memory") == []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert problems(look(nixl, place, where), "locked-memory") == []


@pytest.mark.parametrize(
    ("transports", "count"),
    [
        ("tcp", 0),
        ("tcp,cuda_copy,cuda_ipc,sm,self", 0),
        ("", 1),
        ("rc,tcp", 1),
        ("rc_x", 1),
        ("ib", 1),
        ("^rc", 1),
        ("all", 1),
    ],
)
def test_locked_memory_does_not_count_for_tcp(
    transports: str, count: int, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = serve({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 * 1024, resource.RLIM_INFINITY))
    setup = look(nixl, place, machine(tmp_path), {"UCX_TLS": transports} if transports else {})
    assert len(problems(setup, "locked-memory")) == count


@pytest.mark.parametrize(
    ("words", "mib", "why"),
    [
        (cpu(1, "-tp", "2"), 64, "processes exchange messages"),
        (cpu(1, "-tp", "2"), 1024, ""),
        (cpu(1), 64, ""),
        (["lmcache", "server", "--shm-name", "l1", "--l1-size-gb", "2"], 1024, "--shm-name puts L1 there"),
        (["lmcache", "server", "--l1-size-gb", "2"], 1024, ""),
    ],
)
def test_shared_memory(
    words: list[str], mib: int, why: str, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = SimpleNamespace(f_blocks=mib, f_bavail=mib, f_frsize=2**20)
    monkeypatch.setattr(doctor_machine.os, "statvfs", lambda path: size)
    found = problems(look(words, place, machine(tmp_path)), "shared-memory")
    assert bool(found) == bool(why)
    assert all(why in line.what and "--ipc host" in line.do for line in found)


def test_of_a_container_that_is_not_this_one_nothing_is_said(tmp_path: Path) -> None:
    words = f"docker run vllm/vllm-openai:latest --model m --kv-transfer-config '{json.dumps(V1)}'"
    setup = look(words, tmp_path, machine(tmp_path / "m"), {"LMCACHE_MAX_LOCAL_CPU_SIZE": "999"})
    assert setup.settings == []
    for name in ("installed", "locked-memory", "shared-memory"):
        assert {line.status for line in say(setup, name)} == {"unchecked"}
