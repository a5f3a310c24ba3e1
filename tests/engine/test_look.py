"""`kvfix look` at a real engine under load that was started without kvfix: read from inside, and nothing is wrong."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvfix.ledger import liveness
from kvfix.ledger.standstill import Look, verdicts
from kvfix_tools.look import command, lmcache_server, looking
from tests.engine.start import CROWD, TWO_PROCESSES, run, server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LOOKS = 12


def test_a_healthy_engine(tmp_path: Path) -> None:
    looks: list[Look] = []
    decided: list[Look] = []
    servers: list[dict[str, Any]] = []
    clients: set[int] = set()

    def do(pid: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until and not (looks and _busy(looks[-1])):
            time.sleep(0.5)
            looker = looking.Looker(looking.engine_of(pid), full=False)
            looks[:] = [looker.look()]
        for _ in range(LOOKS):
            looks.append(looker.look())
            if liveness.engines(looks[-1].processes):
                servers[:] = lmcache_server.of(looks[-1].processes)
                clients.update(lmcache_server.client_of(each["pid"]) for each in servers)
        decided.extend(command.enough(looker))
        (tmp_path / "stop").touch()  # however long the looks take, the engine has requests until now

    with server() as transfer:
        ran = run(
            tmp_path, False, transfer, calm=CROWD, flags=str(tmp_path), engine=TWO_PROCESSES, forked=False,
            when=("Initializing a V1 LLM engine", do),
        )  # fmt: skip
    assert all(each == ran.answer["rounds"][0] for each in ran.answer["rounds"])
    inside = [each for each in looks if liveness.engines(each.processes)]
    assert len(inside) > LOOKS // 2
    assert sum(map(_busy, inside)) > 2
    (engine,) = liveness.engines(inside[-1].processes)
    assert engine.sees_transfers
    assert [each["class"] for each in engine.connectors] == ["LMCacheMPConnector"]
    for first, second in pairwise(inside):
        assert verdicts([first, second]) == []
    assert verdicts(decided) == []
    (server_of_it,) = servers
    assert server_of_it["answers"]
    assert 0 < server_of_it["used_bytes"] < server_of_it["total_bytes"]
    assert server_of_it["objects"] > 0
    assert clients - {0}
    assert clients - {0} <= {each["pid"] for look in inside for each in look.processes}
    assert f"LMCache server ({server_of_it['pid']}): L1 " in lmcache_server.line(server_of_it)


def _busy(look: Look) -> bool:
    return any(engine.requests for engine in liveness.engines(look.processes))
